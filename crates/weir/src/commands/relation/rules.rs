//! The rules of a relation: which files it copies, and how fast. Options, and how they are shown.
use clap::Args;
use serde_json::{Value, json};
use weir_admin::failure::Outcome;
use weir_admin::sizes::parse_size;
use weir_admin::table;
use weir_client::Client;
use weir_proto::relation::{BYTES_PER_S_MIN, RelationId, RelationRules};
use weir_proto::{Error, ErrorKind};

/// Of a new relation.
#[derive(Args)]
pub struct Rules {
    /// Copy only files that fit this pattern, or are in a directory that does; may be given several times
    /// (patterns as in .gitignore, from the volume's root on)
    #[arg(long, value_name = "PATTERN")]
    pub include: Vec<String>,
    /// Do not copy files and directories that fit this pattern; may be given several times
    #[arg(long, value_name = "PATTERN")]
    pub exclude: Vec<String>,
    /// Limit all movers of the relation together, like 500MB/s, or none. Recalls count, and do not wait
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub bandwidth: Option<Rate>,
}

/// Bytes per second; 0: no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate(pub u64);

fn parse_rate(text: &str) -> Result<Rate, String> {
    if text.eq_ignore_ascii_case("none") {
        return Ok(Rate(0));
    }
    let bad = || format!("{text:?} is not a rate: expected one like 500MB/s or 1.5GB/s, or none");
    let rate = parse_size(text.trim_end_matches("/s")).map_err(|_| bad())?;
    match rate {
        0..BYTES_PER_S_MIN => {
            Err(format!("{text:?} is too little: {} are the least", shown_rate(BYTES_PER_S_MIN)))
        }
        rate => Ok(Rate(rate)),
    }
}

impl Rules {
    pub fn rules(&self) -> RelationRules {
        let bytes_per_s = self.bandwidth.map(|rate| rate.0).filter(|rate| *rate > 0);
        RelationRules { include: self.include.clone(), exclude: self.exclude.clone(), bytes_per_s }
    }
}

/// Options of `weir relation set`.
#[derive(Args)]
pub struct Change {
    #[command(flatten)]
    pub rules: Rules,
    /// Copy all files that are not excluded again
    #[arg(long, conflicts_with = "include")]
    pub no_include: bool,
    /// Remove all --exclude patterns
    #[arg(long, conflicts_with = "exclude")]
    pub no_exclude: bool,
}

impl Change {
    /// The new lists; none: they stay.
    pub fn lists(&self) -> (Option<Vec<String>>, Option<Vec<String>>) {
        let list = |given: &[String], none: bool| (none || !given.is_empty()).then(|| given.to_vec());
        (list(&self.rules.include, self.no_include), list(&self.rules.exclude, self.no_exclude))
    }
    pub fn is_empty(&self) -> bool {
        self.lists() == (None, None) && self.rules.bandwidth.is_none()
    }
}

/// A relation's rules; those of a server of an older program: none.
pub async fn rules_of(client: &Client, relation: RelationId) -> Outcome<RelationRules> {
    let all = match client.relation_rules().await {
        Err(Error { kind: ErrorKind::Unsupported, .. }) => Vec::new(),
        all => all?,
    };
    let found = all.into_iter().find(|of| of.relation == relation);
    Ok(found.map_or_else(RelationRules::default, |of| of.rules))
}

/// `500 MB/s`: as it is given.
fn shown_rate(bytes_per_s: u64) -> String {
    match bytes_per_s {
        0..1_000_000 => format!("{} kB/s", bytes_per_s as f64 / 1e3),
        _ => format!("{} MB/s", bytes_per_s as f64 / 1e6),
    }
}

pub fn as_json(rules: &RelationRules) -> Value {
    let RelationRules { include, exclude, bytes_per_s } = rules;
    json!({ "include": include, "exclude": exclude, "bandwidth_bytes_per_s": bytes_per_s })
}

/// Lines of `weir relation show`.
pub fn lines(rules: &RelationRules) -> Vec<String> {
    let list = |patterns: &[String]| table::plain(&patterns.join("  "));
    let mut lines = Vec::new();
    if !rules.include.is_empty() {
        lines.push(format!("  include     {}", list(&rules.include)));
    }
    if !rules.exclude.is_empty() {
        lines.push(format!("  exclude     {}", list(&rules.exclude)));
    }
    lines.extend(rules.bytes_per_s.map(|limit| format!("  bandwidth   at most {}", shown_rate(limit))));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_people_write_them() {
        for (text, rate) in
            [("500MB/s", 500_000_000), ("1.5GB/s", 1_500_000_000), ("1MiB", 1 << 20), ("none", 0)]
        {
            assert_eq!(parse_rate(text), Ok(Rate(rate)), "{text}");
        }
        for text in ["", "fast", "0", "5kB/s", "-1MB/s", "1MB/h"] {
            assert!(parse_rate(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn rules_are_shown_as_they_were_given() {
        let include = vec!["*.h5".to_owned(), "/meta/".to_owned()];
        let rules = RelationRules { include, exclude: vec![], bytes_per_s: Some(500_000_000) };
        assert_eq!(lines(&rules), ["  include     *.h5  /meta/", "  bandwidth   at most 500 MB/s"]);
        assert_eq!(shown_rate(BYTES_PER_S_MIN), "16.384 kB/s");
        assert_eq!(lines(&RelationRules::default()), Vec::<String>::new());
    }
}
