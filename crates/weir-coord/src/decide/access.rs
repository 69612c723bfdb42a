//! Changes of the rules for mounts: the resulting list, or the reason for refusing it.
use weir_proto::access::{AuditRule, RULES_MAX, WORD_MAX};
use weir_proto::coord::{AccessAdd, AccessRemove};
use weir_proto::map::ClusterMap;
use weir_proto::version::LEVEL_OF_STEPS;
use weir_proto::{Error, Result};

/// Adds a rule; returns a description of the change. `Exists`: there is a rule of that name. `NotFound`: the
/// rule that it would precede does not exist.
pub fn add_rule(map: &mut ClusterMap, add: &AccessAdd) -> Result<String> {
    let (rule, rules) = (&add.rule, &mut map.access.0);
    rule.check()?;
    if rules.iter().any(|known| known.name == rule.name) {
        return Err(Error::exists(format!("there is a rule {:?} already", rule.name))
            .hint("remove it first, or choose another name"));
    }
    if rules.len() >= RULES_MAX {
        return Err(Error::invalid(format!("there are {RULES_MAX} rules for mounts, which is the most"))
            .hint("globs and networks let one rule name many nodes"));
    }
    let at = match &add.before {
        None => rules.len(),
        Some(name) => rules.iter().position(|known| known.name == *name).ok_or_else(|| no_rule(name))?,
    };
    rules.insert(at, rule.clone());
    Ok(format!("rule for mounts {:?} is number {} of {}", rule.name, at + 1, rules.len()))
}

/// Removes a rule; returns a description of the change. `NotFound`: there is none of that name.
pub fn remove_rule(map: &mut ClusterMap, remove: &AccessRemove) -> Result<String> {
    let rules = &mut map.access.0;
    let at = rules.iter().position(|rule| rule.name == remove.name).ok_or_else(|| no_rule(&remove.name))?;
    rules.remove(at);
    Ok(format!("rule for mounts {:?} is removed, {} are left", remove.name, rules.len()))
}

/// Sets which operations on volumes are audited; returns a description of the change.
pub fn audit_volumes(map: &mut ClusterMap, rule: AuditRule) -> Result<String> {
    if rule.volumes.is_empty() || rule.volumes.len() > WORD_MAX {
        return Err(Error::invalid(format!("a glob of volumes has 1 to {WORD_MAX} bytes")));
    }
    if map.level < LEVEL_OF_STEPS {
        return Err(Error::unsupported(format!(
            "a cluster of level {} records neither opens nor changes",
            map.level
        ))
        .hint("`weir upgrade finish` raises the level"));
    }
    map.audits.retain(|known| known.volumes != rule.volumes);
    let recorded = match (rule.opens, rule.changes) {
        (false, false) => return Ok(format!("nothing of volumes {} is recorded any more", rule.volumes)),
        (true, false) => "opens",
        (false, true) => "changes",
        (true, true) => "opens and changes",
    };
    if map.audits.len() >= RULES_MAX {
        return Err(Error::invalid(format!(
            "there are {RULES_MAX} rules for the audit log, which is the limit"
        )));
    }
    let recorded = format!("{recorded} in volumes {} are recorded", rule.volumes);
    map.audits.push(rule);
    Ok(recorded)
}

fn no_rule(name: &str) -> Error {
    Error::not_found(format!("there is no rule {name:?}")).hint("`weir access list` shows all rules")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::groups::tests::cluster;
    use weir_proto::ErrorKind;
    use weir_proto::access::{AccessRule, Grant, IdsAre, RootIs, VolumeGrant};

    fn add(map: &mut ClusterMap, name: &str, before: Option<&str>) -> Result<String> {
        let rule = AccessRule {
            name: name.into(),
            who: "*".into(),
            from: vec![],
            volumes: vec![VolumeGrant { glob: "*".into(), grant: Grant::ReadOnly }],
            root: RootIs::Squashed,
            ids: IdsAre::Claimed {},
        };
        add_rule(map, &AccessAdd { rule, before: before.map(str::to_owned) })
    }

    #[test]
    fn rules_are_kept_in_the_order_that_was_asked_for() {
        let mut map = cluster(6, "ec:4+2");
        let names = |map: &ClusterMap| map.access.0.iter().map(|r| r.name.clone()).collect::<Vec<_>>();
        add(&mut map, "b", None).unwrap();
        add(&mut map, "d", None).unwrap();
        add(&mut map, "a", Some("b")).unwrap();
        assert_eq!(add(&mut map, "c", Some("d")).unwrap(), "rule for mounts \"c\" is number 3 of 4");
        assert_eq!(names(&map), ["a", "b", "c", "d"]);
        let before = map.clone();
        assert_eq!(add(&mut map, "c", None).unwrap_err().kind, ErrorKind::Exists);
        assert_eq!(add(&mut map, "e", Some("x")).unwrap_err().kind, ErrorKind::NotFound);
        assert_eq!(add(&mut map, "", None).unwrap_err().kind, ErrorKind::Invalid);
        let remove = |map: &mut ClusterMap, name: &str| remove_rule(map, &AccessRemove { name: name.into() });
        assert_eq!(remove(&mut map, "x").unwrap_err().kind, ErrorKind::NotFound);
        assert_eq!(map, before, "a refusal changes nothing");
        remove(&mut map, "b").unwrap();
        assert_eq!(names(&map), ["a", "c", "d"]);
        for n in map.access.0.len()..RULES_MAX {
            add(&mut map, &format!("rule-{n}"), None).unwrap();
        }
        assert!(add(&mut map, "more", None).unwrap_err().context.contains("256 rules"));
    }
}
