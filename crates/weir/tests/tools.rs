//! Claim: the programs that people use every day work on a mount.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, h5py, has, shell};
use std::path::Path;

/// Makes a source tree with links, modes and a few sizes.
fn source_tree(dir: &Path) {
    shell(&format!(
        "mkdir -p {0}/src/deep/er {0}/empty && cd {0} && \
         for i in $(seq 1 60); do head -c $((i * i * 37)) /dev/urandom > src/f$i; done && \
         head -c 7000001 /dev/urandom > src/deep/er/big && chmod 755 src/f1 && chmod 600 src/f2 && \
         ln -s ../src/f1 empty/link && ln src/f3 src/deep/hard && printf 'x' > 'src/name with  spaces ü'",
        dir.display()
    ));
}

#[test]
fn everyday_tools_work() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let m = cluster.mount().display();
    let outside = tempfile::tempdir().unwrap();
    let tree = outside.path().join("tree");
    source_tree(&tree);
    let t = tree.display();

    shell(&format!("cp -r {t} {m}/copied && diff -r {t} {m}/copied"));
    shell(&format!(
        "tar -C {t} -cf {m}/t.tar . && mkdir {m}/untarred && tar -C {m}/untarred -xf {m}/t.tar && diff -r {t} {m}/untarred"
    ));
    if has("rsync") {
        shell(&format!(
            "rsync -aH {t}/ {m}/synced && diff -r {t} {m}/synced && [ -z \"$(rsync -aHi {t}/ {m}/synced)\" ]"
        ));
    }
    if has("git") {
        let repo = outside.path().join("repo");
        let r = repo.display();
        shell(&format!(
            "cp -r {t} {r} && cd {r} && git init -q . && git add -A && git -c user.name=t -c user.email=t@t commit -qm one && \
             git clone -q {r} {m}/cloned && cd {m}/cloned && git fsck --strict && git status --porcelain && \
             echo change >> src/f1 && git -c user.name=t -c user.email=t@t commit -qam two && git gc -q && git fsck --strict && \
             [ $(git log --oneline | wc -l) = 2 ]"
        ));
    }
    if has("sqlite3") {
        let sum = shell(&format!(
            "cd {m} && sqlite3 db 'create table t(a integer primary key, b blob);' && \
             for i in 1 2 3; do sqlite3 db \"with recursive n(x) as (select 1 union all select x+1 from n where x<2000) \
             insert into t(b) select randomblob(200) from n;\"; done && \
             sqlite3 db 'delete from t where a % 7 = 0; vacuum; pragma integrity_check; select count(*) from t;'"
        ));
        assert_eq!(sum.split_whitespace().collect::<Vec<_>>(), ["ok", "5143"]);
    }
    shell(&format!(
        "dd if=/dev/urandom of={m}/dd bs=777 count=5000 status=none && sync {m}/dd && mv {m}/dd {m}/dd2 && cksum {m}/dd2"
    ));
    shell(&format!("rm -rf {m}/* && [ -z \"$(ls -A {m})\" ]"));
}

#[test]
fn fio_verifies_its_writes_buffered_direct_and_mapped() {
    if !can_mount() || !has("fio") {
        return;
    }
    let cluster = Cluster::start(1);
    let m = cluster.mount().display();
    let common = "--size=24m --verify=crc32c --verify_fatal=1 --do_verify=1 --output-format=terse";
    for (name, options) in [
        ("sequential", "--rw=write --bs=1m"),
        ("random", "--rw=randwrite --bs=4k"),
        ("odd", "--rw=randwrite --bs=47008 --size=23504000"),
        ("direct", "--rw=randwrite --bs=64k --direct=1"),
        ("synced", "--rw=write --bs=16k --fsync=8 --size=4m"),
        ("mapped", "--rw=randwrite --bs=8k --ioengine=mmap"),
    ] {
        shell(&format!("cd {m} && fio --name={name} {common} {options} > /dev/null"));
    }
}

#[test]
fn hdf5_files_are_created_appended_and_read() {
    let Some(python) = h5py() else { return };
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let script = r#"
import h5py, numpy as np, sys
path = sys.argv[1]
frames = np.random.default_rng(1).integers(0, 2**20, size=(12, 300, 200), dtype=np.int32)
with h5py.File(path, "w") as f:
    d = f.create_dataset("frames", shape=(0, 300, 200), maxshape=(None, 300, 200), chunks=(1, 300, 200), dtype="i4", compression="gzip")
    for i in range(6):
        d.resize(i + 1, axis=0); d[i] = frames[i]; f.flush()
with h5py.File(path, "a") as f:
    d = f["frames"]
    for i in range(6, 12):
        d.resize(i + 1, axis=0); d[i] = frames[i]
    f.attrs["done"] = True
with h5py.File(path, "r") as f:
    assert f.attrs["done"] and (f["frames"][...] == frames).all()
"#;
    let file = cluster.mount().join("frames.h5");
    let python = python.display();
    shell(&format!("{python} - {} <<'E'\n{script}\nE", file.display()));
}
