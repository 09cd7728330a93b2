#!/bin/sh
# The first process of the guest whose packages are updated: installs a set of the second disk and switches the machine off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
set=$(sed -n 's/.*\bset=\([^ ]*\).*/\1/p' /proc/cmdline)
echo "BOOTED, set ${set:-none}" >/dev/ttyS0
if [ -n "$set" ] && [ "$set" != null ]; then
    mount -t ext4 -o ro /dev/vdb /mnt
    dpkg --force-confold -i "/mnt/$set"/*.deb >/dev/ttyS0 2>&1
    echo $? >/update.done
    umount /mnt
fi
sync
umount /tmp
mount -o remount,ro /
busybox poweroff -f
