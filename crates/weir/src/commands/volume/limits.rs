//! Limits of volumes, users and groups as options, and as text.
use clap::Args;
use weir_admin::sizes::{parse_count, parse_size};
use weir_admin::times::parse_seconds;
use weir_proto::volume::Quota;

#[derive(Args)]
pub struct Limits {
    /// Limit of bytes, like 10GB or 10GiB; `none` removes it
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes_limit)]
    pub bytes: Option<Limit>,
    /// Soft limit of bytes, which may be exceeded for the grace period; `none` removes it
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes_limit)]
    pub soft_bytes: Option<Limit>,
    /// Limit of files and directories; `none` removes it
    #[arg(long, value_name = "COUNT", value_parser = parse_count_limit)]
    pub inodes: Option<Limit>,
    /// Soft limit of files and directories; `none` removes it
    #[arg(long, value_name = "COUNT", value_parser = parse_count_limit)]
    pub soft_inodes: Option<Limit>,
    /// Grace period of soft limits, like 7d, 12h, 1h30m or 2 weeks; 7d for a new volume
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub grace: Option<u32>,
}

impl Limits {
    pub fn is_none(&self) -> bool {
        let limits = [self.bytes, self.soft_bytes, self.inodes, self.soft_inodes];
        limits.iter().flatten().count() + self.grace.iter().count() == 0
    }
}

/// A limit in its text form: `none`, or a number, which may be 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit(pub Option<u64>);

/// The limits after a command, which were `before` until then.
pub fn limits(args: &Limits, before: Quota) -> Quota {
    let or = |asked: Option<Limit>, before| asked.map_or(before, |limit| limit.0);
    Quota {
        bytes_hard: or(args.bytes, before.bytes_hard),
        bytes_soft: or(args.soft_bytes, before.bytes_soft),
        inodes_hard: or(args.inodes, before.inodes_hard),
        inodes_soft: or(args.soft_inodes, before.inodes_soft),
        grace_s: args.grace.unwrap_or(before.grace_s),
    }
}

fn parse_limit(text: &str, parse: fn(&str) -> Result<u64, String>) -> Result<Limit, String> {
    if text.eq_ignore_ascii_case("none") {
        return Ok(Limit(None));
    }
    parse(text).map(|limit| Limit(Some(limit))).map_err(|why| format!("{why}, or none"))
}
fn parse_bytes_limit(text: &str) -> Result<Limit, String> {
    parse_limit(text, parse_size)
}
fn parse_count_limit(text: &str) -> Result<Limit, String> {
    parse_limit(text, parse_count)
}

/// `10.0 GiB (soft 5.00 GiB)`.
pub fn shown_limit(hard: Option<u64>, soft: Option<u64>, show: impl Fn(u64) -> String) -> String {
    match (hard, soft) {
        (None, None) => "none".into(),
        (Some(hard), None) => show(hard),
        (None, Some(soft)) => format!("soft {}", show(soft)),
        (Some(hard), Some(soft)) => format!("{} (soft {})", show(hard), show(soft)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_a_number_or_none() {
        assert_eq!(
            (parse_bytes_limit("none"), parse_bytes_limit("0")),
            (Ok(Limit(None)), Ok(Limit(Some(0))))
        );
        assert_eq!(
            (parse_count_limit("None"), parse_count_limit("0")),
            (Ok(Limit(None)), Ok(Limit(Some(0))))
        );
    }
}
