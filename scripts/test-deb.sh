#!/bin/bash
# Installs a package, uses it and removes it, on copies of this machine's system that are thrown away: overlays over /, in
# namespaces of their own. In one of them systemd runs. Needs root. `test-deb.sh FILE.deb`
set -euo pipefail

die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }
say() { printf 'test-deb: %s\n' "$*"; }

# ---- outside: copies of the system

outside() {
    [ -f "${1-}" ] || die "no package is named" "make test-deb, or scripts/test-deb.sh FILE.deb"
    [ "$(id -u)" -eq 0 ] || die "only root can install a package" "sudo make test-deb"
    WEIR_DEB=$(readlink -f "$1")
    export WEIR_DEB
    apart --copy
    if [ -x /usr/lib/systemd/systemd ]; then apart --boot; else say "units are not started: systemd is missing"; fi
}

apart() {
    unshare --mount --pid --ipc --uts --net --cgroup --fork --kill-child --propagation private \
        bash "$(readlink -f "$0")" "$1"
}

# Makes a copy below $place/root, with its own /run and /tmp.
make_copy() {
    place=$(mktemp -d)
    # All mounts end with the namespace.
    trap 'cd /; umount -l "$place"; rmdir "$place"' EXIT
    mount -t tmpfs -o size=3g weir-test "$place"
    mkdir "$place/upper" "$place/work" "$place/root"
    mount -t overlay -o "lowerdir=/,upperdir=$place/upper,workdir=$place/work" weir-test "$place/root" ||
        die "no overlay can be made over /" "run it on a machine, or in a virtual machine; not in a nested container"
    cd "$place/root"
    mount -t proc proc proc
    mount -t tmpfs tmpfs run
    mount -t tmpfs tmpfs tmp
    cp "$WEIR_DEB" root/weir.deb
    cp "$0" root/test-deb.sh
    # Systems for containers leave manuals out.
    rm -f etc/dpkg/dpkg.cfg.d/*excludes* etc/dpkg/dpkg.cfg.d/docker usr/local/bin/weir usr/local/sbin/weir
    hostname weir-test
    ip link set lo up
}

copy() {
    make_copy
    mount --rbind /dev dev
    mount --rbind /sys sys
    chroot . env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 bash /root/test-deb.sh --inside
}

# Starts systemd in the copy: it runs the claims about units as its only service.
boot() {
    make_copy
    mount -t tmpfs tmpfs dev
    for device in null zero full random urandom tty fuse; do
        touch "dev/$device"
        mount --bind "/dev/$device" "dev/$device"
    done
    mkdir dev/shm dev/pts dev/mqueue dev/hugepages
    mount -t tmpfs tmpfs dev/shm
    mount -t devpts devpts dev/pts
    mount -t mqueue mqueue dev/mqueue
    ln -s /proc/self/fd dev/fd
    ln -s pts/ptmx dev/ptmx
    : >dev/console
    mount -t sysfs -o ro sysfs sys
    if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then mount -t cgroup2 cgroup2 sys/fs/cgroup; else
        mount -t tmpfs tmpfs sys/fs/cgroup
        mkdir sys/fs/cgroup/systemd sys/fs/cgroup/unified
        mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
        mount -t cgroup2 cgroup2 sys/fs/cgroup/unified
    fi
    # The kernel's settings are those of this machine, not of the copy.
    for unit in systemd-sysctl systemd-modules-load; do ln -sf /dev/null etc/systemd/system/$unit.service; done
    cat >etc/systemd/system/weir-claims.service <<'UNIT'
[Unit]
DefaultDependencies=no
After=basic.target
[Service]
Type=oneshot
ExecStart=/bin/bash /root/test-deb.sh --units
StandardOutput=file:/root/said
StandardError=file:/root/said
ExecStopPost=/bin/systemctl --no-block exit 0
UNIT
    # A process that ends with this one, as the copy's first process has to be systemd.
    unshare --pid --mount --fork --kill-child bash -c '
        mount -t proc proc proc
        mkdir -p old && pivot_root . old && cd / && umount -l /old
        exec env -i container=weir PATH=/usr/sbin:/usr/bin:/sbin:/bin /usr/lib/systemd/systemd \
            --unit=weir-claims.service --log-target=journal --show-status=no </dev/null >/dev/null 2>&1' || true
    [ -s root/said ] || die "systemd did not start" "is /sys/fs/cgroup mounted, and may this machine mount cgroups?"
    cat root/said
    grep -qx "test-deb: all of it holds" root/said || die "units do not do what they are for" "the lines above say what"
}

# ---- inside: the claims

check() { # what holds, then a command
    local claim=$1
    shift
    if "$@" >/tmp/said 2>&1; then say "$claim"; else
        cat /tmp/said >&2
        die "not so: $claim" "the command was: $*"
    fi
}
shows() { # text, then a command that prints it
    local text=$1
    shift
    "$@" >/tmp/shown 2>&1 || { cat /tmp/shown; return 1; }
    grep -qF -- "$text" /tmp/shown || { cat /tmp/shown; return 1; }
}
fails() { ! "$@"; }

# What bash offers for these words.
offers() {
    bash -c 'source /usr/share/bash-completion/completions/weir
        function=$(complete -p weir | sed -E "s/.*-F ([^ ]+).*/\1/")
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_TYPE=9
        "$function" weir "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf "%s\n" "${COMPREPLY[@]}"' bash "$@"
}

# Runs what a unit starts, until it has said READY=1 to its socket.
started() {
    local unit=$1 instance=$2
    local line
    line=$(sed -n 's/^ExecStart=//p' "/usr/lib/systemd/system/weir-$unit@.service" | sed "s/%i/$instance/g; s/\"//g")
    python3 - "$line" <<'PYTHON'
import os, socket, subprocess, sys
path = "/tmp/notify"
if os.path.exists(path):
    os.unlink(path)
systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
systemd.bind(path)
systemd.settimeout(60)
log = open("/tmp/role.log", "w")
role = subprocess.Popen(sys.argv[1].split(), env={**os.environ, "NOTIFY_SOCKET": path, "WATCHDOG_USEC": "300000"}, stderr=log)
try:
    heard, beats = [], 0
    while beats < 3 or not any(said.startswith("READY=1\n") for said in heard):
        said = systemd.recv(4096).decode()
        heard.append(said)
        beats += said == "WATCHDOG=1"
    print("\n".join(heard))
finally:
    role.terminate()
    code = role.wait(30)
    print(open("/tmp/role.log").read())
sys.exit(code)
PYTHON
}

inside() {
    check "the package installs" dpkg -i /root/weir.deb
    check "the program runs" shows "weir 0." weir --version
    check "a man page has exit statuses" shows "a user or a group is reached" man -P cat -l /usr/share/man/man1/weir-volume-create.1.gz
    check "a man page has examples" shows "weir volume create ada --owner" man -P cat weir-volume-create
    check "the user of the package exists" getent passwd weir
    if command -v systemd-analyze >/dev/null; then
        for role in coord meta storage mover mount; do
            check "the unit of $role is valid" systemd-analyze verify "weir-$role@test.service"
        done
        check "the unit of the console is valid" systemd-analyze verify weir-console.service
        for role in coord meta storage; do
            check "the unit of $role is confined" systemd-analyze security --offline=yes --threshold=30 --no-pager \
                "/usr/lib/systemd/system/weir-$role@.service"
        done
    fi
    check "bash completes commands" shows status offers weir sta

    check "weir init writes what its unit runs" weir init --dir /var/lib/weir/c --listen tcp:127.0.0.1:7700
    check "a coordinator started as by its unit is ready and alive" shows READY=1 started coord c

    mkdir -p /mnt/all /mnt/one
    check "a cluster starts" weir up --dir /var/lib/weir/demo --targets 3 --scheme ec:2+1
    check "a volume is made" weir volume create beam --dir /var/lib/weir/demo
    check "bash completes names of volumes" shows beam offers weir volume show --dir /var/lib/weir/demo be
    cat >/etc/fstab <<'FSTAB'
weir:/      /mnt/all  weir  cluster=/var/lib/weir/demo,_netdev,nofail,noatime,x-systemd.automount  0 0
weir:/beam  /mnt/one  weir  cluster=/var/lib/weir/demo,_netdev,ro,memory-mib=64                    0 0
FSTAB
    check "a line of fstab mounts all" mount /mnt/all
    check "a line of fstab mounts one volume" mount -a
    check "both are Weir" shows fuse.weir findmnt -n -o FSTYPE /mnt/one
    echo data >/mnt/all/beam/file
    check "the volume is the top of its mount" shows data cat /mnt/one/file
    check "the option ro is obeyed" fails touch /mnt/one/new
    mkdir -p /mnt/not
    check "a wrong option is refused in words" fails mount -t weir weir:/ /mnt/not -o cluster=/var/lib/weir/demo,nonsense
    check "a directory that is missing is refused" fails mount -t weir weir:/none /mnt/not -o cluster=/var/lib/weir/demo
    check "umount ends a mount" umount /mnt/one
    check "umount ends the other" umount /mnt/all
    check "the cluster stops" weir down --dir /var/lib/weir/demo

    check "the package is removed" dpkg -r weir
    check "the program is gone" fails test -e /usr/bin/weir
    check "the configuration stays" test -f /etc/weir/environment
    check "data stays" test -d /var/lib/weir/demo
    check "the package is purged" dpkg -P weir
    check "its configuration is gone" fails test -e /etc/weir/environment
    check "data stays all the same" test -d /var/lib/weir/demo
    say "all of it holds"
}

# ---- inside, under systemd

# A node with one role, joined and started.
node() { # role, name, further words of `weir join`
    local role=$1 name=$2
    shift 2
    weir join "$(weir token create --dir /var/lib/weir/c --role "$role")" --dir "/var/lib/weir/$name" --name "$name" "$@"
    if [ "$role" = meta ]; then found_namespace "$name"; fi
    systemctl start "weir-$role@$name"
}
# The first start of a metadata server is by hand.
found_namespace() {
    weir meta --config "/var/lib/weir/$1/meta.toml" --new --pid-file /run/meta.pid 2>/tmp/meta.log &
    until_is "the namespace is founded" grep -q '"ready":true' /run/meta.pid
    kill -TERM %1
    wait %1
}
until_is() { # what is waited for, then a command
    local what=$1 _
    shift
    for _ in $(seq 600); do if "$@" >/dev/null 2>&1; then return 0; fi; sleep 0.1; done
    echo "not within a minute: $what"
    return 1
}
main_pid() { systemctl show -p MainPID --value "weir-$1.service"; }
is_another() { [ "$(main_pid "$1")" -gt 1 ] && [ "$(main_pid "$1")" != "$2" ] && systemctl -q is-active "weir-$1.service"; }
restarts_after() { # signal, unit
    local before
    before=$(main_pid "$2")
    kill "-$1" "$before"
    until_is "another process of $2" is_another "$2" "$before"
}

units() {
    trap 'systemctl --no-pager -l status "weir-*@*" || true; journalctl --no-pager -n 60' ERR
    set -E
    check "the package installs" dpkg -i /root/weir.deb
    check "a cluster is founded" weir init --dir /var/lib/weir/c --listen tcp:127.0.0.1:7700 --targets 3 --scheme ec:2+1
    check "the coordinator's unit starts" systemctl start weir-coord@c
    for name in s1 s2 s3; do check "the unit of $name starts" node storage "$name" --listen tcp:127.0.0.1:0; done
    check "the metadata server's unit starts" node meta m --listen tcp:127.0.0.1:0
    mkdir -p /mnt/weir
    check "the mount's unit starts" node mount n --mount /mnt/weir
    check "the mover's unit starts" node mover v
    check "systemd shows what a role does" shows "s1 serves: tcp:127.0.0.1" systemctl show -p StatusText weir-storage@s1
    check "a volume is made" weir volume create beam --owner 65534 --dir /var/lib/weir/c
    check "files can be written" until_is "a file" sh -c 'echo data > /mnt/weir/beam/file'
    check "a role that was killed is started again" restarts_after KILL storage@s1
    mkdir -p /run/systemd/system/weir-storage@s2.service.d
    printf '[Service]\nWatchdogSec=2\n' >/run/systemd/system/weir-storage@s2.service.d/soon.conf
    systemctl daemon-reload
    systemctl restart weir-storage@s2
    check "a role that hangs is killed by the watchdog" restarts_after STOP storage@s2
    check "the journal has the reason" shows watchdog journalctl --no-pager -u weir-storage@s2
    check "the cluster becomes healthy again" until_is "health" weir status --dir /var/lib/weir/c
    cp /var/lib/weir/c/coord.toml /var/lib/weir/c/admin.pem /etc/weir/
    check "commands find the cluster of /etc/weir" shows healthy weir status
    check "owners are shown by name" shows nobody weir volume list
    check "a removal stops the units" dpkg -r weir
    check "no role is left" fails pgrep -x weir
    say "all of it holds"
}

case ${1-} in
--copy) copy ;;
--boot) boot ;;
--units) units ;;
--inside) inside ;;
*) outside "$@" ;;
esac
