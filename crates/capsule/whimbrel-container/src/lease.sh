#!/.whimbrel/busybox sh
# Sets what a DHCP server gave (udhcpc calls it).
b=/.whimbrel/busybox
case $1 in bound | renew) ;; *) exit 0 ;; esac
$b ip address replace "$ip/${mask:-24}" dev "$interface"
for address in $router; do $b ip route replace default via "$address" && break; done
[ -n "$dns" ] || exit 0
{
    [ -n "$domain" ] && echo "search $domain"
    for server in $dns; do echo "nameserver $server"; done
} >/etc/resolv.conf.new
# A link of the image may lead nowhere.
$b rm -f /etc/resolv.conf
$b mv /etc/resolv.conf.new /etc/resolv.conf
