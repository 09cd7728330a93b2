#!/.whimbrel/busybox sh
# The first process of a machine that was made of a container image: devices, network, qemu-ga, then the program
# of the image. When the program ends, the machine is switched off.
b=/.whimbrel/busybox
here=/.whimbrel
$b mkdir -p /proc /sys /dev /etc /run /sbin /tmp
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mkdir -p /dev/pts /dev/shm
$b mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
$b mount -t tmpfs -o mode=1777 shm /dev/shm
$b ln -sf /proc/self/fd /dev/fd
$b ln -sf /proc/self/fd/0 /dev/stdin
$b ln -sf /proc/self/fd/1 /dev/stdout
$b ln -sf /proc/self/fd/2 /dev/stderr
# Programs of any user write their logs to it.
$b chmod 622 /dev/console /dev/ttyS0 2>/dev/null

# A disk that was made larger: the file system becomes as large. Its programs are those of the host, as qemu-ga is.
disk=$($b findfs LABEL=container)
size=$($b cat "/sys/class/block/${disk##*/}/size")
if [ -e $here/resize2fs ] && [ "$size" != "$($b cat $here/size 2>/dev/null)" ]; then
    if said=$($here/lib/loader --library-path $here/lib $here/resize2fs "$disk" 2>&1); then
        echo "$size" >$here/size
    else
        echo "the file system is not made larger: $said"
    fi
fi

# The disk with the machine's name and its settings, which may be secret, if it has one.
name=container
seed=$($b findfs LABEL=CIDATA 2>/dev/null)
if [ -n "$seed" ] && $b mkdir -p $here/seed && $b mount -t vfat -o ro,umask=077 "$seed" $here/seed; then
    given=$($b sed -n 's/.*"local-hostname":"\([^"]*\)".*/\1/p' $here/seed/meta-data)
    name=${given:-$name}
fi
$b hostname "$name"
echo "$name" >/etc/hostname
printf '127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\t%s\n' "$name" >/etc/hosts

$b ip link set lo up
for port in /sys/class/net/*; do
    port=${port##*/}
    [ "$port" = lo ] && continue
    $b ip link set "$port" up
    # Waits for an address for some seconds, and then goes on asking in the background.
    $b udhcpc -b -i "$port" -x "hostname:$name" -s $here/lease -t 5 -T 1 -A 5 >/dev/null 2>&1
done

# The power button, and qemu-ga's way to switch off.
$b acpid -c $here/acpi -l /dev/null -p /run/acpid.pid >/dev/null 2>&1
# qemu-ga as the host has it, with its own libraries. What it starts finds the programs of the image.
[ -e /sbin/shutdown ] || $b ln -s $here/shutdown /sbin/shutdown
[ -e /sbin/hwclock ] || $b ln -s $b /sbin/hwclock
agent() {
    device=/dev/$1
    # For its PATH; it also sets the arguments.
    . $here/program
    while :; do
        $here/lib/loader --library-path $here/lib $here/qemu-ga -m virtio-serial -p "$device" -t /run \
            -f /run/qemu-ga.pid >/dev/null 2>&1
        $b sleep 1
    done
}
if [ -e $here/qemu-ga ]; then
    for port in /sys/class/virtio-ports/*; do
        [ -e "$port/name" ] && [ "$($b cat "$port/name")" = org.qemu.guest_agent.0 ] && agent "${port##*/}" &
    done
fi

program() {
    # The kernel's own for the first process.
    unset HOME
    . $here/program
    whose=${user%%:*}
    [ -n "$HOME" ] || HOME=$($b awk -F: -v "u=${whose:-0}" '$1 == u || $3 == u { print $6; exit }' /etc/passwd 2>/dev/null)
    export HOME="${HOME:-/}"
    $b mkdir -p "$folder"
    cd "$folder" || exit 1
    # What a script that was given with the machine exports is the environment of the program.
    case $($b head -c 2 $here/seed/user-data 2>/dev/null) in '#!') . $here/seed/user-data ;; esac
    [ -n "$user" ] || exec "$@"
    # A number without a name gets one: start-stop-daemon asks for it.
    number=${user%%:*}
    group=${user#"$number"}
    group=${group#:}
    case $number in
    *[!0-9]*) ;;
    *)
        case $group in '' | *[!0-9]*) primary=0 ;; *) primary=$group ;; esac
        $b grep -q "^[^:]*:[^:]*:$number:" /etc/passwd 2>/dev/null ||
            echo "user$number:x:$number:$primary::/:/bin/sh" >>/etc/passwd
        ;;
    esac
    command=$1
    shift
    command=$(command -v "$command" || echo "$command")
    exec $b start-stop-daemon -S -p $here/no-file -c "$user" -a "$command" -- "$@"
}
signal=$(. $here/program && echo "$signal")
program </dev/console >/dev/console 2>&1 &
child=$!
trap 'kill -$signal $child' TERM
while :; do
    wait $child
    status=$?
    kill -0 $child 2>/dev/null || break
done
echo "the program ended with status $status"
kill -KILL -1
$b sync
$b poweroff -f
