//! The rules of relations: their records, and the files that a relation does not copy.
//!
//! Kept beside the relation's own record, so that older programs read that as before, and ignore these.
use super::record::RulesRecord;
use super::store;
use crate::namespace::path::{Paths, names_of, place_of};
use crate::namespace::volume;
use crate::tables;
use std::cell::RefCell;
use weir_kv::Read;
use weir_proto::patterns::{self, Patterns};
use weir_proto::relation::{BYTES_PER_S_MIN, RelationId, RelationRules};
use weir_proto::{Error, InodeId, Result, VolumeId};

pub fn record(read: &dyn Read, relation: RelationId) -> Result<RulesRecord> {
    Ok(tables::RULES.get(read, relation)?.unwrap_or_default())
}
pub fn load(read: &dyn Read, relation: RelationId) -> Result<RelationRules> {
    record(read, relation).map(|record| record.rules)
}

/// The patterns of a relation, and paths of its volume: which inodes it does not copy.
pub struct Excluded<'a> {
    patterns: Patterns,
    /// There are patterns, or were: bytes of files that home does not have yet may not be queued.
    pub partial: bool,
    read: &'a dyn Read,
    paths: RefCell<Paths<'a>>,
}

impl<'a> Excluded<'a> {
    pub fn load(read: &'a dyn Read, relation: RelationId, volume: VolumeId) -> Result<Excluded<'a>> {
        let RulesRecord { rules, scans_again } = record(read, relation)?;
        let patterns = Patterns::of(&rules);
        // Without patterns no path is asked for.
        let root = if patterns.is_empty() { InodeId::ROOT } else { volume::load(read, volume)?.root };
        let partial = scans_again || !patterns.is_empty();
        Ok(Excluded { patterns, partial, read, paths: RefCell::new(Paths::new(read, root)) })
    }
    /// Why an inode is not copied under any of its present names; `None`: one of them is included, or it has
    /// none. The reason is that of its first name.
    pub fn why(&self, ino: InodeId, is_directory: bool) -> Result<Option<String>> {
        if self.patterns.is_empty() {
            return Ok(None);
        }
        let Some((dir, name)) = place_of(self.read, ino)? else { return Ok(None) };
        let Some(why) = self.why_name(dir, &name, is_directory)? else { return Ok(None) };
        if !is_directory {
            for (dir, name) in names_of(self.read, ino, usize::MAX)?.iter().skip(1) {
                if self.why_name(*dir, name, false)?.is_none() {
                    return Ok(None);
                }
            }
        }
        Ok(Some(why))
    }
    /// Why a name in a directory is not copied; `None`: it is, or that directory is gone.
    pub fn why_name(&self, dir: InodeId, name: &[u8], is_directory: bool) -> Result<Option<String>> {
        if self.patterns.is_empty() {
            return Ok(None);
        }
        let path = self.paths.borrow_mut().named(dir, name)?;
        Ok(path.and_then(|path| self.patterns.excludes(&path, is_directory)))
    }
}

/// All relations with rules.
pub fn all(read: &dyn Read) -> Result<Vec<(RelationId, RelationRules)>> {
    let mut found = Vec::new();
    for (id, _) in store::relations(read)? {
        let rules = load(read, id)?;
        if rules != RelationRules::default() {
            found.push((id, rules));
        }
    }
    Ok(found)
}

pub fn check(rules: &RelationRules) -> Result<()> {
    patterns::check(rules)?;
    match rules.bytes_per_s {
        Some(limit) if limit < BYTES_PER_S_MIN => Err(Error::invalid(format!(
            "{limit} bytes per second: {BYTES_PER_S_MIN} are the least, 0 removes the limit"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;

    #[test]
    fn the_layout_of_rules_never_changes() {
        let rules = RelationRules {
            include: vec!["*.h5".into()],
            exclude: vec!["/a".into(), "b/".into()],
            bytes_per_s: Some(0x0102),
        };
        let text = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let value = [
            vec![1, 1, 0, 0, 0],
            text("*.h5"),
            vec![2, 0, 0, 0],
            text("/a"),
            text("b/"),
            vec![1, 2, 1, 0, 0, 0, 0, 0, 0, 1],
        ]
        .concat();
        let record = RulesRecord { rules, scans_again: true };
        assert_eq!(record.to_value(), value);
        assert_eq!(RulesRecord::from_value(&value, String::new).unwrap(), record);
    }

    #[test]
    fn a_limit_that_would_stop_all_is_refused() {
        let rules = |limit| RelationRules { bytes_per_s: limit, ..RelationRules::default() };
        assert!(check(&rules(Some(5))).is_err());
        check(&rules(Some(BYTES_PER_S_MIN))).unwrap();
        check(&rules(None)).unwrap();
    }
}
