//! The rules for places where users may have homes: an administrator allows a place, or forbids it.
use weir_proto::home_rule::{HOME_RULES_MAX, HomeRule, is_same_place};
use weir_proto::{Error, Result};

/// Adds a rule, or replaces the one for the same place. Returns whether anything changed.
pub fn allow_home(rules: &mut Vec<HomeRule>, rule: HomeRule) -> Result<bool> {
    rule.check()?;
    if let Some(known) = rules.iter_mut().find(|known| is_same_place(&known.place, &rule.place)) {
        let is_new = *known != rule;
        *known = rule;
        return Ok(is_new);
    }
    if rules.len() >= HOME_RULES_MAX {
        return Err(Error::invalid(format!("homes are allowed in {HOME_RULES_MAX} places already"))
            .hint("allow a directory above, or forbid one that is not needed"));
    }
    rules.push(rule);
    Ok(true)
}

/// Removes a rule. `NotFound`: there is none for this place.
pub fn forbid_home(rules: &mut Vec<HomeRule>, place: &str) -> Result<()> {
    let before = rules.len();
    rules.retain(|known| !is_same_place(&known.place, place));
    match rules.len() < before {
        true => Ok(()),
        false => Err(Error::not_found(format!("no rule allows homes in {place}"))
            .hint("`weir home list` shows the rules; each is removed by its own place")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::ErrorKind;

    #[test]
    fn a_place_has_one_rule_and_a_cluster_a_limit() {
        let mut rules = Vec::new();
        let places = |rules: &[HomeRule]| rules.iter().map(|r| r.place.clone()).collect::<Vec<_>>();
        assert_eq!(allow_home(&mut rules, HomeRule::plain("file:///a")), Ok(true));
        assert_eq!(allow_home(&mut rules, HomeRule::plain("file:///a")), Ok(false));
        let rule = HomeRule { allow_root: true, ..HomeRule::plain("file:///a/") };
        assert_eq!(allow_home(&mut rules, rule.clone()), Ok(true));
        assert_eq!(rules, [rule], "it replaces the former rule");
        allow_home(&mut rules, HomeRule::plain("file:///a/b")).unwrap();
        assert_eq!(forbid_home(&mut rules, "file:///").unwrap_err().kind, ErrorKind::NotFound);
        forbid_home(&mut rules, "file:///a").unwrap();
        assert_eq!(places(&rules), ["file:///a/b"]);
        assert!(allow_home(&mut rules, HomeRule::plain("/a")).is_err());
        for n in 1..HOME_RULES_MAX {
            allow_home(&mut rules, HomeRule::plain(&format!("file:///{n}"))).unwrap();
        }
        let full = allow_home(&mut rules, HomeRule::plain("file:///more")).unwrap_err();
        assert!(full.context.contains("128 places already"), "{full}");
        allow_home(&mut rules, HomeRule::plain("file:///1")).unwrap();
    }
}
