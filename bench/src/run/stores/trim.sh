#!/bin/sh
# Runs below a Debian root with redis and PostgreSQL in it: makes /small, a root of only those two, and a database.
set -e
server=/usr/lib/postgresql/15
small=/small
mkdir -p $small/usr/bin $small/usr/sbin $small/usr/lib $small/usr/lib64 $small/dev $small/proc $small/sys $small/run $small/tmp
for folder in bin sbin lib lib64; do ln -s usr/$folder $small/$folder; done
busybox=$(command -v busybox)
for file in $busybox $server/bin/postgres $server/bin/initdb /usr/bin/redis-server; do
    echo $file
    # A program without shared libraries has none.
    ldd $file 2>/dev/null | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p; s/^[[:space:]]*\(\/[^ ]*\) (.*/\1/p' || :
done | sort -u | xargs cp -L --parents -t $small
# Links followed: the only zone is one.
cp -rL --parents -t $small /usr/share/postgresql/15 /usr/share/zoneinfo/UTC /etc/passwd /etc/group /etc/nsswitch.conf \
    $server/lib/plpgsql.so $server/lib/dict_snowball.so
chroot $small $busybox --install -s /usr/bin
# Only for initdb: the guest has a file system of devices over it.
: >$small/dev/null
chmod 666 $small/dev/null
chmod 1777 $small/tmp
mkdir -p $small/var/data $small/var/redis
chown postgres: $small/var/data
# Small log segments: a new one is written whole before it is used.
chroot --userspec=postgres $small $server/bin/initdb -D /var/data -N -A trust -E UTF8 --locale=C --wal-segsize=1 >/dev/null
cat >>$small/var/data/postgresql.conf <<END
listen_addresses = '*'
unix_socket_directories = '/tmp'
shared_buffers = 16MB
max_connections = 20
jit = off
END
echo 'host all all 0.0.0.0/0 trust' >>$small/var/data/pg_hba.conf
# The tables of pgbench, of one unit. The server is reached by its socket alone, for it is in the network of whoever makes this.
chroot --userspec=postgres $small $server/bin/postgres -D /var/data -c listen_addresses= -c dynamic_shared_memory_type=mmap -c fsync=off >/dev/null 2>&1 &
postgres=$!
trap 'kill -INT $postgres' EXIT
tries=0
until $server/bin/pgbench --host=$small/tmp --username=postgres --initialize --quiet postgres >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 100 ]
    sleep 0.2
done
trap - EXIT
kill -INT $postgres
wait $postgres
