//! Every message: decoders survive any bytes, and an encoded message is decoded to the same.
use crate::counting;
use weir_decoders::{Dice, for_every_message};
use weir_proto::map::{Layout, Scheme};
use weir_proto::sender::{Sender, Senders};
use weir_proto::{CellId, Error, FileId, Wire, methods};

const ROUNDS: usize = 10_000;

/// Decoding is one to one: bytes that are accepted are those that the value is encoded to. And it takes
/// memory in proportion to the received bytes, with any lengths in them.
#[inline(never)]
fn survives<T: Wire>(name: &str, bytes: &[u8]) {
    let mut decoded = None;
    let taken = counting::peak_bytes(|| decoded = T::from_bytes(bytes).ok());
    assert!(
        taken <= counting::bytes_max(bytes.len()),
        "{name}: {taken} bytes for a message of {}",
        bytes.len()
    );
    if let Some(value) = decoded {
        assert_eq!(value.to_bytes(), bytes, "{name}");
    }
}

#[inline(never)]
fn survives_random_bytes<T: Wire>(name: &str) {
    let mut dice = Dice::for_name(name);
    for _ in 0..ROUNDS {
        survives::<T>(name, &dice.bytes(300));
    }
    for length in 0..64 {
        survives::<T>(name, &vec![0xff; length]);
        survives::<T>(name, &vec![0; length]);
    }
}

#[inline(never)]
fn survives_mutated_messages<T: Wire>(name: &str) {
    let mut dice = Dice::for_name(name);
    for _ in 0..ROUNDS / 500 {
        let Some(good) = dice.encoding::<T>() else { continue };
        for _ in 0..500 {
            let mut bad = good.clone();
            dice.mutate(&mut bad);
            survives::<T>(name, &bad);
        }
    }
}

#[inline(never)]
fn is_decoded_as_it_was_encoded<T: Wire + PartialEq + std::fmt::Debug>(name: &str) {
    let mut dice = Dice::for_name(name);
    let mut seen = 0;
    // Few random bytes are a whole large message.
    for _ in 0..10_000 {
        if seen == 30 {
            break;
        }
        let Some(bytes) = dice.encoding::<T>() else { continue };
        let value = T::from_bytes(&bytes).unwrap();
        assert_eq!(value.to_bytes(), bytes, "{name}");
        assert_eq!(T::from_bytes(&value.to_bytes()).unwrap(), value, "{name}");
        // No prefix of it, and nothing behind it, is taken for it.
        for end in 0..bytes.len().min(200) {
            assert!(T::from_bytes(&bytes[..end]).is_err(), "{name} cut to {end} bytes");
        }
        assert!(T::from_bytes(&[&bytes[..], &[0]].concat()).is_err(), "{name} and a byte");
        seen += 1;
    }
    assert!(seen >= 10, "{name}: only {seen} values were found");
}

#[test]
fn decoders_survive_random_bytes() {
    for_every_message!(survives_random_bytes);
    survives_random_bytes::<Error>("Error");
    survives_random_bytes::<Layout>("Layout");
}

#[test]
fn decoders_survive_mutated_messages() {
    for_every_message!(survives_mutated_messages);
    survives_mutated_messages::<Error>("Error");
    survives_mutated_messages::<Layout>("Layout");
}

/// A length without its bytes must not be trusted: that the allocator is counted at all, and the memory that
/// a trusted one takes.
#[test]
fn memory_is_counted() {
    let claimed = 1 << 20;
    let taken = counting::peak_bytes(|| drop(std::hint::black_box(Vec::<u8>::with_capacity(claimed))));
    assert!(taken >= claimed && taken > counting::bytes_max(300), "{taken}");
    assert_eq!(counting::peak_bytes(|| ()), 0);
}

#[test]
fn messages_are_decoded_as_they_were_encoded() {
    for_every_message!(is_decoded_as_it_was_encoded);
    is_decoded_as_it_was_encoded::<Error>("Error");
    is_decoded_as_it_was_encoded::<Layout>("Layout");
    is_decoded_as_it_was_encoded::<Scheme>("Scheme");
    is_decoded_as_it_was_encoded::<FileId>("FileId");
    is_decoded_as_it_was_encoded::<CellId>("CellId");
}

const SOURCES: [(&str, &str); 25] = [
    ("access", include_str!("../../../weir-proto/src/access.rs")),
    ("backup", include_str!("../../../weir-proto/src/backup.rs")),
    ("early", include_str!("../../../weir-proto/src/early.rs")),
    ("local_creates", include_str!("../../../weir-proto/src/local_creates.rs")),
    ("condition", include_str!("../../../weir-proto/src/condition.rs")),
    ("coord", include_str!("../../../weir-proto/src/coord.rs")),
    ("copies", include_str!("../../../weir-proto/src/copies.rs")),
    ("data", include_str!("../../../weir-proto/src/data.rs")),
    ("enrol", include_str!("../../../weir-proto/src/enrol.rs")),
    ("event", include_str!("../../../weir-proto/src/event.rs")),
    ("export", include_str!("../../../weir-proto/src/export.rs")),
    ("life", include_str!("../../../weir-proto/src/life.rs")),
    ("meta", include_str!("../../../weir-proto/src/meta.rs")),
    ("quota", include_str!("../../../weir-proto/src/quota.rs")),
    ("recall", include_str!("../../../weir-proto/src/recall.rs")),
    ("volume", include_str!("../../../weir-proto/src/volume.rs")),
    ("relation", include_str!("../../../weir-proto/src/relation.rs")),
    ("snapshot", include_str!("../../../weir-proto/src/snapshot.rs")),
    ("lock", include_str!("../../../weir-proto/src/lock.rs")),
    ("home_rule", include_str!("../../../weir-proto/src/home_rule.rs")),
    ("map", include_str!("../../../weir-proto/src/map.rs")),
    ("news", include_str!("../../../weir-proto/src/news.rs")),
    ("version", include_str!("../../../weir-proto/src/version.rs")),
    ("watch", include_str!("../../../weir-proto/src/watch.rs")),
    ("frame", include_str!("../../../weir-proto/src/frame.rs")),
];

/// What each `message!` of a source declares: its first line without documentation and attributes.
fn declared(source: &str) -> impl Iterator<Item = &str> {
    source.split("message!(").skip(1).map(|rest| {
        rest.lines()
            .map(str::trim)
            .find(|line| !line.is_empty() && !line.starts_with("//") && !line.starts_with("#"))
            .unwrap_or_default()
    })
}

thread_local!(static LISTED: std::cell::RefCell<std::collections::BTreeSet<String>> = Default::default());

#[inline(never)]
fn note<T: Wire>(name: &str) {
    let _ = T::from_bytes(&[]);
    LISTED.with_borrow_mut(|listed| listed.insert(name.to_owned()));
}

#[test]
fn no_source_is_forgotten() {
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../weir-proto/src")).unwrap() {
        let path = entry.unwrap().path();
        let declares = std::fs::read_to_string(&path)
            .is_ok_and(|text| text.lines().any(|line| line.starts_with("message!(")));
        let known = SOURCES.iter().any(|(module, _)| path.ends_with(format!("{module}.rs")));
        assert!(known || !declares, "{} is not among SOURCES", path.display());
    }
}

#[test]
fn the_list_is_complete() {
    for_every_message!(note);
    let listed = LISTED.take();
    for (module, source) in SOURCES {
        for line in declared(source) {
            let name: String = line.chars().take_while(|c| c.is_alphanumeric()).collect();
            let name = format!("{module}::{name}");
            assert!(listed.contains(&name), "{name} is missing in for_every_message");
        }
    }
}

#[test]
fn no_method_number_is_used_twice() {
    let mut seen = std::collections::BTreeMap::new();
    for (module, source) in SOURCES {
        for line in declared(source) {
            let Some((name, rest)) = line.split_once(" = ") else { continue };
            let number: u16 = rest.split(' ').next().unwrap().parse().unwrap();
            let range = match module {
                "coord" | "enrol" | "event" | "export" | "life" => 1..100,
                "copies"
                    if ["SetCopies", "KeepCopy", "CopyCaughtUp", "CopyLost", "LeaderSilent"]
                        .contains(&name) =>
                {
                    1..100
                }
                "condition" if name == "TroubleList" => 100..200,
                "condition" => 1..100,
                "copies" => 400..420,
                "relation" if ["RelationAddWith", "RelationSet", "RelationRulesList"].contains(&name) => {
                    420..440
                }
                "volume" if ["GetWriteFloors", "SetWriteFloor"].contains(&name) => 420..440,
                "early" => 427..430,
                "local_creates" if ["MkdirWithNames", "LeaseFiles"].contains(&name) => 420..440,
                "watch" => 500..510,
                "data" => 200..300,
                _ if ["Revoke", "LockFree", "EvictOwn", "RecoverFile"].contains(&name) => 300..400,
                _ => 100..200,
            };
            assert!(range.contains(&number), "{name} has number {number}");
            let listed = methods::find(number).map(|method| method.name);
            assert_eq!(listed, Some(name), "{name} is missing in the table of methods");
            assert_eq!(seen.insert(number, name), None, "{name}");
        }
    }
    assert_eq!(seen.len(), methods::all().count());
}

/// The table of senders is a page for people, too.
#[test]
fn the_table_of_senders_is_documented() {
    let page = include_str!("../../../../docs/protocol.md");
    let to = |number| match number {
        44..48 => "a metadata leader",
        78 => "a member",
        0..100 => "the coordinator",
        100..200 | 420..440 => "a metadata leader",
        200..300 => "a target",
        300..400 => "a client",
        500..504 | 505 => "any process",
        504 => "the coordinator",
        _ => "a copy of a journal",
    };
    let mut rows: Vec<(&str, Senders, Vec<&str>)> = Vec::new();
    for method in methods::all() {
        match rows.iter_mut().find(|(at, by, _)| (*at, *by) == (to(method.number), method.by)) {
            Some((_, _, names)) => names.push(method.name),
            None => rows.push((to(method.number), method.by, vec![method.name])),
        }
    }
    for (to, by, names) in rows {
        let by: Vec<String> = Sender::ALL.iter().filter(|s| by.has(**s)).map(ToString::to_string).collect();
        let row = format!("| {to} | {} | {} |\n", by.join(", "), names.join(", "));
        assert!(page.contains(&row), "docs/protocol.md lacks this row:\n{row}");
    }
}
