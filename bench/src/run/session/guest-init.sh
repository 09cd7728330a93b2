#!/bin/busybox sh
# The first process of a guest that works on its disk: drivers, the disk, the work, with a word on the serial port after each part.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done </modules/order
option() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
stty -F /dev/ttyS0 raw -echo 2>/dev/null
for _ in $(seq 100); do [ -e /dev/vda ] && break; sleep 0.1; done
echo BEGIN
mount -t ext4 /dev/vda /mnt || echo FAILED to mount
cd /mnt || echo FAILED to enter
rm -f main.* trace stack-*
./work documents "$(option documents)" || echo FAILED at documents
./work seismic "$(option mib)" || echo FAILED at the trace
cd / && umount /mnt || echo FAILED to unmount
echo END
poweroff -f
