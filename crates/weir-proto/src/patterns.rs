//! Patterns of paths: the files of a volume that a relation copies. As in `.gitignore`: a pattern without a
//! slash fits names in any directory, others are paths below the volume's root; `*` and `?` stand for
//! characters of one name, `**` for any directories; one that ends with a slash fits directories only. An
//! excluded directory excludes everything in it.
//!
//! Pure. Nothing is compiled: a leader asks for each new file.
use crate::glob::fits;
use crate::relation::RelationRules;
use crate::{Error, Result};

/// Patterns of one list.
pub const PATTERNS_MAX: usize = 64;
/// Longest pattern, in bytes.
pub const PATTERN_BYTES_MAX: usize = 512;

/// The patterns of a relation, ready for use.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Patterns {
    include: Vec<Pattern>,
    exclude: Vec<Pattern>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Pattern {
    text: String,
    /// Components; `**` is one of its own.
    parts: Vec<String>,
    only_directories: bool,
}

impl Pattern {
    fn parse(text: &str) -> Pattern {
        let only_directories = text.ends_with('/');
        let path = text.trim_end_matches('/');
        let mut parts: Vec<String> = path.trim_start_matches('/').split('/').map(str::to_owned).collect();
        if !path.contains('/') {
            parts.insert(0, "**".into());
        }
        Pattern { text: text.to_owned(), parts, only_directories }
    }

    fn fits(&self, path: &[&str], is_directory: bool) -> bool {
        if self.only_directories && !is_directory {
            return false;
        }
        let (mut p, mut w) = (0, 0);
        // The position to continue from after the last `**`, if it takes one more component.
        let mut retry = None;
        while w < path.len() {
            match self.parts.get(p) {
                Some(part) if part == "**" => {
                    retry = Some((p + 1, w));
                    p += 1;
                }
                Some(part) if fits(part, path[w]) => (p, w) = (p + 1, w + 1),
                _ => {
                    let Some((after, taken)) = retry else { return false };
                    (p, w) = (after, taken + 1);
                    retry = Some((after, taken + 1));
                }
            }
        }
        self.parts[p..].iter().all(|part| part == "**")
    }
}

impl Patterns {
    pub fn of(rules: &RelationRules) -> Patterns {
        let parse = |list: &[String]| list.iter().map(|text| Pattern::parse(text)).collect();
        Patterns { include: parse(&rules.include), exclude: parse(&rules.exclude) }
    }
    /// Everything is copied.
    pub fn is_empty(&self) -> bool {
        self.include.is_empty() && self.exclude.is_empty()
    }

    /// Why a path below the volume's root is not copied; `None`: it is. Directories are only excluded by
    /// patterns to exclude: a file to include may be in them.
    pub fn excludes(&self, path: &[u8], is_directory: bool) -> Option<String> {
        if self.is_empty() {
            return None;
        }
        let path = String::from_utf8_lossy(path);
        let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
        let of = |list: &'_ [Pattern]| -> Option<String> {
            let fits = |pattern: &&Pattern| {
                (1..=names.len()).any(|n| pattern.fits(&names[..n], is_directory || n < names.len()))
            };
            list.iter().find(fits).map(|pattern| pattern.text.clone())
        };
        if let Some(pattern) = of(&self.exclude) {
            return Some(format!("its pattern {pattern:?} excludes it"));
        }
        let is_missed = !is_directory && !self.include.is_empty() && of(&self.include).is_none();
        is_missed.then(|| "none of its patterns includes it".to_owned())
    }
}

/// Refuses lists that cannot be used, and patterns that mean something else elsewhere.
pub fn check(rules: &RelationRules) -> Result<()> {
    for list in [&rules.include, &rules.exclude] {
        if list.len() > PATTERNS_MAX {
            return Err(Error::invalid(format!(
                "{} patterns in one list: {PATTERNS_MAX} are the most",
                list.len()
            )));
        }
        list.iter().try_for_each(|text| check_one(text))?;
    }
    Ok(())
}

fn check_one(text: &str) -> Result<()> {
    let refuse = |why: String| Err(Error::invalid(format!("the pattern {text:?} {why}")));
    if text.trim_matches('/').is_empty() || text.len() > PATTERN_BYTES_MAX {
        return refuse(format!("must have 1 to {PATTERN_BYTES_MAX} bytes, and a name"));
    }
    if text.starts_with('!') {
        return refuse("begins with \"!\": use the other list, exclusion comes first".into());
    }
    if let Some(other) = text.chars().find(|c| "[]{}\\".contains(*c) || c.is_control()) {
        return refuse(format!("has {other:?}: only *, ** and ? stand for something"));
    }
    let parts = || text.trim_matches('/').split('/');
    if parts().any(|part| part.is_empty() || part == "." || part == "..") {
        return refuse("has an empty name, \".\" or \"..\" between slashes".into());
    }
    if parts().any(|part| part != "**" && part.contains("**")) {
        return refuse("has \"**\" beside other characters: it stands for whole names".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(include: &[&str], exclude: &[&str]) -> RelationRules {
        let list = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        RelationRules { include: list(include), exclude: list(exclude), ..RelationRules::default() }
    }

    #[test]
    fn patterns_fit_as_in_gitignore() {
        for (pattern, path, is_directory, excluded) in [
            ("*.tmp", "a/b.tmp", false, true),
            ("*.tmp", "a.tmp/b", false, true),
            ("*.tmp", "a/b.tmpx", false, false),
            ("/top", "top", false, true),
            ("/top", "a/top", false, false),
            ("a/*.h5", "a/x.h5", false, true),
            ("a/*.h5", "a/b/x.h5", false, false),
            ("a/**/x", "a/x", false, true),
            ("a/**/x", "a/b/c/x", false, true),
            ("**/logs/*.txt", "p/logs/1.txt", false, true),
            ("scratch/", "scratch", false, false),
            ("scratch/", "scratch", true, true),
            ("scratch/", "a/scratch/deep/f", false, true),
            ("a/**", "a/b", false, true),
            ("frame-??", "frame-01", false, true),
        ] {
            let patterns = Patterns::of(&rules(&[], &[pattern]));
            assert_eq!(
                patterns.excludes(path.as_bytes(), is_directory).is_some(),
                excluded,
                "{pattern} {path}"
            );
        }
        let many = Patterns::of(&rules(&[], &[&"**/a/".repeat(60)]));
        assert!(many.excludes("a/".repeat(2000).trim_end_matches('/').as_bytes(), false).is_some());
    }

    #[test]
    fn files_outside_the_includes_are_excluded_and_directories_not() {
        let patterns = Patterns::of(&rules(&["*.h5", "/keep/"], &["bad*"]));
        for (path, is_directory, why) in [
            ("a/x.h5", false, None),
            ("keep/any/thing", false, None),
            ("a/x.txt", false, Some("none of its patterns includes it")),
            ("a", true, None),
            ("keep/bad/x.h5", false, Some("its pattern \"bad*\" excludes it")),
        ] {
            assert_eq!(patterns.excludes(path.as_bytes(), is_directory).as_deref(), why, "{path}");
        }
        assert_eq!(Patterns::default().excludes(b"a", false), None);
    }

    #[test]
    fn patterns_that_mean_something_else_elsewhere_are_refused() {
        for text in ["", "/", "!a", "a[0-9]", "{a,b}", "a\\*", "a//b", "../a", "a/./b", "a**b", "a\nb"] {
            assert!(check(&rules(&[], &[text])).is_err(), "{text:?}");
        }
        for text in ["*", "**", "a", "/a/", "**/a b/*.h?", "ü*"] {
            check(&rules(&[text], &[text])).unwrap();
        }
        let many = vec!["a"; PATTERNS_MAX + 1];
        assert!(check(&rules(&many, &[])).is_err());
    }
}
