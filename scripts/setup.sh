#!/bin/sh
# Installs what this machine lacks: `setup.sh program` what building and running the program needs (and the demo),
# `setup.sh deb` what making a Debian package needs besides, `setup.sh cluster` what `make demo-cluster` needs besides,
# `setup.sh alerts` only what checks alert rules, `setup.sh` what the tests need, too. Says what it does; changes nothing and takes a moment when everything is there.
set -eu
cd "$(dirname "$0")/.."

rust_needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
packages="build-essential pkg-config libisal-dev fuse3 ca-certificates"
cluster_packages="etcd-server iproute2 python3"
test_packages="$cluster_packages bzip2 etcd-client git attr rsync sqlite3 fio e2fsprogs xfsprogs python3-venv"

case ${1-} in
program | deb | alerts) tests= ;;
cluster) tests= packages="$packages $cluster_packages" ;;
"") tests=yes packages="$packages $test_packages" ;;
*) printf 'error: %s is no part of the setup\nhint: setup.sh [program | deb | cluster | alerts]\n' "$1" >&2; exit 2 ;;
esac

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else die "cannot install packages: not root, and sudo is missing" "run as root: apt-get install $packages"
    fi
}

is_installed() { dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

install_packages() {
    missing=
    for package in $packages; do is_installed "$package" || missing="$missing $package"; done
    [ -n "$missing" ] || return 0
    say "installing with apt:$missing"
    as_root apt-get -qq update
    # shellcheck disable=SC2086 # a list of words
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing >/dev/null
}

# True if version $1 is at least version $2.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

has_rust() {
    command -v cargo >/dev/null && command -v rustc >/dev/null || return 1
    at_least "$(rustc --version | cut -d ' ' -f 2)" "$rust_needed"
}

install_rust() {
    has_rust && return 0
    if ! command -v rustup >/dev/null && apt-cache show rustup >/dev/null 2>&1; then
        say "installing with apt: rustup"
        as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y rustup >/dev/null
    fi
    if command -v rustup >/dev/null; then
        say "installing the stable Rust toolchain with rustup"
        rustup toolchain install stable --profile default --no-self-update
        rustup default stable
    fi
    has_rust || die "Rust $rust_needed or newer is needed, and this distribution does not package it" \
        "install it as https://www.rust-lang.org/tools/install says, then run this again"
}

# For the test that runs h5py on a mount.
install_python() {
    if [ -x .venv/bin/python ] && .venv/bin/python -c 'import h5py' 2>/dev/null; then return 0; fi
    say "making .venv with h5py"
    if ! { python3 -m venv .venv && .venv/bin/python -m pip -q install h5py; }; then
        die "h5py could not be installed into .venv" "pip said why above; \`cargo test\` leaves out what is missing"
    fi
}

# Test tools: never linked with, only run. Kept in a cache, because building them takes minutes.
tools=${WEIR_TOOLS:-$HOME/.cache/weir-tools}
install_tool() {
    if [ -x "$tools/bin/$1" ] && "$tools/bin/$1" --version 2>/dev/null | grep -q " $2\$"; then return 0; fi
    say "building the test tool $1 $2 into $tools"
    cargo install -q --locked --force --root "$tools" --version "$2" "$1" ||
        die "$1 $2 could not be built" "cargo said why above; \`cargo test\` leaves out what is missing"
}

# The S3 service of the tests is a Go program.
install_s3() {
    [ -x "$tools/bin/versitygw" ] && [ -e "$tools/versitygw-$1" ] && return 0
    if ! command -v go >/dev/null; then
        say "installing with apt: golang-go"
        as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends golang-go >/dev/null
    fi
    say "building the test tool versitygw $1 into $tools"
    GOBIN="$tools/bin" go install "github.com/versity/versitygw/cmd/versitygw@v$1" ||
        die "versitygw $1 could not be built" "go said why above; \`cargo test\` leaves out what is missing"
    touch "$tools/versitygw-$1"
}

# Only the tool: the whole package would start a server here.
install_promtool() {
    if command -v promtool >/dev/null || [ -x "$tools/bin/promtool" ]; then return 0; fi
    command -v apt-get >/dev/null || die "promtool is missing" "it is part of Prometheus; put it into the PATH"
    say "unpacking promtool of the package prometheus into $tools"
    unpacked=$(mktemp -d)
    mkdir -p "$tools/bin"
    if ! { (cd "$unpacked" && apt-get -qq download prometheus 2>/dev/null && dpkg-deb -x prometheus_*.deb .) &&
        mv "$unpacked/usr/bin/promtool" "$tools/bin/"; }; then
        rm -rf "$unpacked"
        die "promtool could not be unpacked" "apt-get update, then try again; or put promtool into the PATH"
    fi
    rm -rf "$unpacked"
}
if [ "${1-}" = alerts ]; then install_promtool; exit 0; fi

if ! command -v apt-get >/dev/null; then
    has_rust || die "Rust $rust_needed or newer is needed" "see https://www.rust-lang.org/tools/install"
    say "this is no Debian: see to it yourself that these are installed: $packages"
    exit 0
fi
install_packages
install_rust
if [ "${1-}" = deb ]; then install_tool cargo-deb 3.8.0; fi
[ -n "$tests" ] || exit 0
install_python
install_tool pjdfstest 0.2.2
install_tool fsx 0.3.2
install_s3 1.8.0
