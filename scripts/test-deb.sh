#!/bin/bash
# Installs a package, uses it and removes it, on a copy of this machine's system that is thrown away: an overlay over /, in
# namespaces of its own. Needs root. `test-deb.sh FILE.deb`
set -euo pipefail

die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }
say() { printf 'test-deb: %s\n' "$*"; }

# ---- outside: the copy

outside() {
    [ -f "${1-}" ] || die "no package is named" "make test-deb, or scripts/test-deb.sh FILE.deb"
    [ "$(id -u)" -eq 0 ] || die "only root can install a package" "sudo make test-deb"
    WEIR_DEB=$(readlink -f "$1") exec unshare --mount --pid --ipc --uts --fork --kill-child --propagation private \
        bash "$(readlink -f "$0")" --copy
}

copy() {
    local place
    place=$(mktemp -d)
    mount -t tmpfs -o size=3g weir-test "$place"
    mkdir "$place/upper" "$place/work" "$place/root"
    mount -t overlay -o "lowerdir=/,upperdir=$place/upper,workdir=$place/work" weir-test "$place/root" ||
        die "no overlay can be made over /" "run it on a machine, or in a virtual machine; not in a nested container"
    cd "$place/root"
    mount --rbind /dev dev
    mount -t proc proc proc
    mount --rbind /sys sys
    mount -t tmpfs tmpfs run
    mount -t tmpfs tmpfs tmp
    cp "$WEIR_DEB" tmp/weir.deb
    cp "$0" tmp/test-deb.sh
    hostname weir-test
    # The mounts end with the namespace; the directory stays, so it is removed here.
    local ended=0
    chroot . env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 bash /tmp/test-deb.sh --inside || ended=$?
    cd /
    umount -l "$place"
    rmdir "$place"
    exit "$ended"
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
    # Systems for containers leave manuals out.
    rm -f /etc/dpkg/dpkg.cfg.d/*excludes* /etc/dpkg/dpkg.cfg.d/docker
    rm -f /usr/local/bin/weir /usr/local/sbin/weir
    check "the package installs" dpkg -i /tmp/weir.deb
    check "the program runs" shows "weir 0." weir --version
    check "a man page has exit statuses" shows "volume's limit is reached" man -P cat -l /usr/share/man/man1/weir-volume-create.1.gz
    check "a man page has examples" shows "weir volume create ada --owner" man -P cat weir-volume-create
    check "the user of the package exists" getent passwd weir
    if command -v systemd-analyze >/dev/null; then
        for role in coord meta storage mover mount; do
            check "the unit of $role is valid" systemd-analyze verify "weir-$role@test.service"
        done
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

case ${1-} in
--copy) copy ;;
--inside) inside ;;
*) outside "$@" ;;
esac
