//! Pressure of a machine: for how much of the time work waited for processors, disks or memory.
//!
//! Linux measures it (PSI); without it nothing is known. Knows nothing of the decisions that use it.
use std::sync::Arc;

/// In each of the last ten seconds, on average: the time in which some task waited, in hundredths of a per
/// cent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pressure {
    pub cpu: u16,
    pub io: u16,
    pub memory: u16,
}

/// Reads a machine's pressure; `None`: it does not measure it.
#[derive(Clone)]
pub struct PressureSource(pub Arc<dyn Fn() -> Option<Pressure> + Send + Sync>);

impl PressureSource {
    pub fn read(&self) -> Option<Pressure> {
        (self.0)()
    }
}

/// The figure of a file of the kernel: `some avg10=12.34 avg60=… avg300=… total=…` is its first line.
pub(crate) fn some_avg10(file: &str) -> Option<u16> {
    let some = file.lines().find_map(|line| line.strip_prefix("some "))?;
    let (whole, part) =
        some.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?.split_once('.')?;
    let (whole, part): (u16, u16) = (whole.parse().ok()?, part.get(..2)?.parse().ok()?);
    (whole <= 100).then_some(whole * 100 + part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_file_is_read_and_nothing_else() {
        let file = |avg10: &str| {
            format!(
                "some avg10={avg10} avg60=1.00 avg300=0.50 total=77\nfull avg10=3.00 avg60=0.00 total=5\n"
            )
        };
        for (file, expected) in [
            (file("0.00"), Some(0)),
            (file("12.34"), Some(1234)),
            (file("100.00"), Some(10_000)),
            (file("400.00"), None),
            (file("x"), None),
            ("full avg10=3.00".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(some_avg10(&file), expected, "{file}");
        }
    }
}
