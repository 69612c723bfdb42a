//! The functions that libFuzzer drives; the same as those of `crates/weir/tests/decoders.rs`.
#[allow(dead_code)]
#[path = "../../crates/weir-proto/tests/common/dice.rs"]
mod dice;
#[macro_use]
#[path = "../../crates/weir-proto/tests/common/list.rs"]
mod list;
pub mod targets;

/// Feeds one input to the target of that name.
pub fn run(name: &str, bytes: &[u8]) {
    let target = targets::TARGETS.iter().find(|t| t.name == name);
    (target.expect("each program is one of the targets").run)(bytes);
}
