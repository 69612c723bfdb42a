//! Configuration files, and words that have a grammar of their own.
use std::collections::BTreeMap;
use weir_admin::config;
use weir_proto::map::Scheme;
use weir_proto::{ClusterId, DiskUuid};

pub fn configuration(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match config::parse("weir.toml", text) {
        Err(failure) => assert!(!failure.to_string().is_empty()),
        Ok(found) => {
            let _ = config::check("weir.toml", &found);
            // A value that TOML cannot hold, like a path that is not text, is refused.
            if let Ok(written) = config::write(&found) {
                let again = config::parse("weir.toml", &written);
                assert_eq!(again.expect("a configuration that was written can be read"), found);
            }
        }
    }
}
pub fn configuration_seeds() -> Vec<Vec<u8>> {
    let reference = config::reference();
    let plain = "[cluster]\nid = \"000102030405060708090a0b0c0d0e0f\"\ncoordinators = [\"unix:/run/c\", \
        \"tcp:[::1]:7000\"]\n[node]\nname = \"a\"\nlisten = [\"tcp:127.0.0.1:0\"]\nthreads = 2\n[coord]\ndir = \"/c\"\n\
        targets = 6\nscheme = \"ec:4+2\"\ncell_kib = 512\nlease_ms = 10000\n[storage]\ntargets = [\"/a\", \"/b\"]\n\
        pool = \"default\"\n[mount]\npath = \"/mnt\"\nallow_other = true\n[meta]\ncache_mib = 128\n";
    // The reference with its keys not commented out: as many as are valid.
    let open: String =
        reference.lines().map(|l| format!("{}\n", l.strip_prefix("# ").unwrap_or(l))).collect();
    vec![plain.as_bytes().to_vec(), reference.into_bytes(), open.into_bytes()]
}

/// Words of the command line and of the configuration, and lines of the audit log.
pub fn words(bytes: &[u8]) {
    let _ = weir_trust::audit::open(bytes);
    let _ = weir_trust::audit::resume(bytes);
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    fn same<T: std::str::FromStr + std::fmt::Display + PartialEq + std::fmt::Debug>(text: &str) {
        if let Ok(value) = text.parse::<T>() {
            assert_eq!(value.to_string().parse::<T>().ok(), Some(value), "{text:?}");
        }
    }
    same::<weir_env::Addr>(text);
    same::<Scheme>(text);
    same::<ClusterId>(text);
    same::<DiskUuid>(text);
    let known: BTreeMap<&str, ()> = [("memory_mib", ()), ("threads", ())].into();
    let _ = weir_admin::failure::did_you_mean(text, known.keys().copied());
}
pub fn word_seeds() -> Vec<Vec<u8>> {
    let record = weir_trust::audit::Record {
        time_ns: 1,
        node: "n".into(),
        from: "unix".into(),
        role: "user".into(),
        uid: Some(1),
        what: "Leave".into(),
        on: "n1".into(),
        result: weir_trust::audit::Outcome::Done,
        again: 1,
    };
    let line = weir_trust::audit::seal(&mut Default::default(), &record);
    [
        line.as_str(),
        "tcp:127.0.0.1:7000",
        "tcp:[fe80::1%2]:0",
        "unix:/run/weir/meta.sock",
        "ec:4+2",
        "replica:3",
        "single",
        "000102030405060708090a0b0c0d0e0f",
        "t14",
        "17",
    ]
    .map(|word| word.as_bytes().to_vec())
    .to_vec()
}
