//! Rules of the cluster map for users' homes: the places, and the movers' behaviour there.
//!
//! A home's URL is parsed here and nowhere else, so that a rule and a mover agree on its meaning.
//!
//! Invariant: a rule covers its place and everything below it, by whole names; all parts except the path are
//! the same. A URL whose path could lead elsewhere (`..`, also written `%2e%2e`) is refused. Refuses to know:
//! how a home is accessed, and which symbolic links exist there.
use crate::{Error, Result, message};

/// Longest URL of a home, in bytes.
pub const URL_MAX: usize = 1024;
/// Rules of a cluster: an administrator makes each one, and all of them are in every node's map.
pub const HOME_RULES_MAX: usize = 128;
/// Ranges of an id map.
const RANGES_MAX: usize = 64;
/// Longest name of a user, and longest path of a credentials file, in bytes.
const USER_MAX: usize = 64;
const FILE_MAX: usize = 1024;

message!(
    /// A place where users may have homes of their volumes, and the movers' behaviour there.
    HomeRule {
        /// Its URL, like `file:///archive`.
        place: String,
        /// Id map for homes there, for relations that have none of their own.
        ids: HomeIds,
        /// The user that movers act as there; absent: their own.
        run_as: Option<String>,
        /// The file with the keys of S3, or with a certificate of another Weir, on every machine with a
        /// mover.
        credentials: Option<String>,
        /// Files keep the mode bits and the capability with which they run as another user.
        keep_setuid: bool,
        /// Root's files stay root's, and devices are copied.
        allow_root: bool,
    }
);
message!(
    /// Users and groups that have other numbers at home; all others have the same.
    HomeIds { users: Vec<IdMapping>, groups: Vec<IdMapping> }
);
impl Default for HomeIds {
    /// All numbers are the same.
    fn default() -> HomeIds {
        HomeIds { users: Vec::new(), groups: Vec::new() }
    }
}
message!(
    /// `count` numbers from `here` on map to those from `there` on at home.
    #[derive(Copy)]
    IdMapping { here: u32, there: u32, count: u32 }
);

impl HomeRule {
    /// A rule with the default behaviour of users' homes.
    pub fn plain(place: &str) -> HomeRule {
        HomeRule {
            place: place.to_owned(),
            ids: HomeIds::default(),
            run_as: None,
            credentials: None,
            keep_setuid: false,
            allow_root: false,
        }
    }

    /// Refuses a rule that no mover could apply.
    pub fn check(&self) -> Result<()> {
        let bad = |why: String| Err(Error::invalid(format!("the place {}: {why}", self.place)));
        let url = HomeUrlParts::parse(&self.place)?;
        if self.place.chars().any(char::is_control)
            || url.names.iter().any(|n| n.chars().any(char::is_control))
        {
            return bad("it contains control characters".to_owned());
        }
        if url.credentials().is_some() {
            return bad("a place names no keys: give the file with --credentials FILE".to_owned());
        }
        self.ids.check(self.allow_root)?;
        if let Some(user) = &self.run_as {
            let is_name = |c: char| c.is_ascii_alphanumeric() || "._-$@+".contains(c);
            if user.is_empty() || user.len() > USER_MAX || !user.chars().all(is_name) {
                return bad(format!("{user:?} is not the name of a user"));
            }
            if user == "root" {
                return bad("movers that run as root act as root there anyway: leave out --run-as".to_owned());
            }
            if self.ids != HomeIds::default() || self.keep_setuid || self.allow_root {
                return bad(
                    "all files there belong to the user of --run-as: leave out the other options".to_owned()
                );
            }
            if url.kind != HomeKind::File {
                return bad("only in a directory (file:///path) movers can act as a user".to_owned());
            }
        }
        match &self.credentials {
            Some(_) if url.kind == HomeKind::File => bad("a directory needs no credentials".to_owned()),
            Some(file) if !file.starts_with('/') || file.len() > FILE_MAX || file.contains('\0') => bad(
                format!("the credentials file {file:?} needs an absolute path of at most {FILE_MAX} bytes"),
            ),
            _ => Ok(()),
        }
    }
}

/// The rule for a home: of those that cover it the one with the longest path.
pub fn rule_for<'a>(rules: &'a [HomeRule], url: &str) -> Result<Option<&'a HomeRule>> {
    let url = HomeUrlParts::parse(url)?;
    let covering = rules.iter().filter_map(|rule| {
        let place = HomeUrlParts::parse(&rule.place).ok()?;
        place.covers(&url).then_some((place.names.len(), rule))
    });
    Ok(covering.max_by_key(|(names, _)| *names).map(|(_, rule)| rule))
}

/// The rule that allows this user a home there. `Denied`: there is none.
pub fn rule_of_user<'a>(rules: &'a [HomeRule], url: &str, user: u32) -> Result<&'a HomeRule> {
    let Some(rule) = rule_for(rules, url)? else {
        let places: Vec<&str> = rules.iter().map(|rule| rule.place.as_str()).collect();
        let places =
            if places.is_empty() { "nowhere".to_owned() } else { format!("only in {}", places.join(", ")) };
        return Err(Error::denied(format!(
            "user {user} may not have the home {url}: homes of users are allowed {places}"
        ))
        .hint("an administrator may allow the place by `weir home allow URL`, or add the relation"));
    };
    if HomeUrlParts::parse(url)?.credentials().is_some() {
        return Err(Error::denied(format!("user {user} may not choose the keys for {url}"))
            .hint(format!("leave out credentials=: the rule for {} names the file", rule.place)));
    }
    Ok(rule)
}

/// Whether two URLs denote the same place, in any spelling.
pub fn is_same_place(one: &str, other: &str) -> bool {
    match (HomeUrlParts::parse(one), HomeUrlParts::parse(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

impl HomeIds {
    /// Refuses ranges that are invalid or overlap, and, without `to_root`, those that lead to root at home.
    pub fn check(&self, to_root: bool) -> Result<()> {
        check_ranges("user", &self.users, to_root)?;
        check_ranges("group", &self.groups, to_root)
    }
}

fn check_ranges(what: &str, ranges: &[IdMapping], to_root: bool) -> Result<()> {
    let bad = |why: String| Err(Error::invalid(format!("the map of {what} numbers {why}: correct the map")));
    if ranges.len() > RANGES_MAX {
        return bad(format!("has {} ranges, and {RANGES_MAX} are possible", ranges.len()));
    }
    for range in ranges {
        let fits = |from: u32| {
            range.count > 0 && from.checked_add(range.count - 1).is_some_and(|last| last < u32::MAX)
        };
        if !fits(range.here) || !fits(range.there) {
            return bad(format!("has a range of {} that does not fit", range.count));
        }
        if range.there == 0 && !to_root {
            return bad("maps a user to root at home".to_owned());
        }
    }
    for (i, a) in ranges.iter().enumerate() {
        for b in &ranges[i + 1..] {
            if overlap((a.here, a.count), (b.here, b.count))
                || overlap((a.there, a.count), (b.there, b.count))
            {
                return bad(format!("has ranges that overlap ({} and {})", a.here, b.here));
            }
        }
    }
    Ok(())
}

fn overlap((a, a_count): (u32, u32), (b, b_count): (u32, u32)) -> bool {
    u64::from(a) < u64::from(b) + u64::from(b_count) && u64::from(b) < u64::from(a) + u64::from(a_count)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HomeKind {
    File,
    S3,
    Weir,
}

/// A parsed home URL. Two are equal if they denote the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HomeUrlParts {
    pub kind: HomeKind,
    /// The bucket, or the coordinators; empty for a directory.
    pub host: String,
    /// The decoded path, by name.
    pub names: Vec<String>,
    /// Sorted; each name once.
    query: Vec<(String, String)>,
}

/// Allowed query names, by kind.
const QUERIES: [(HomeKind, &[&str]); 3] = [
    (HomeKind::File, &[]),
    (HomeKind::S3, &["credentials", "endpoint", "path-style", "profile", "region"]),
    (HomeKind::Weir, &["credentials", "namespace"]),
];

impl HomeUrlParts {
    pub fn parse(text: &str) -> Result<HomeUrlParts> {
        let bad = |why: &str| {
            // Do not show the text itself if it may contain a secret.
            let shown = if text.contains('@') {
                text.split_once("://").map_or("it", |(scheme, _)| scheme)
            } else {
                text
            };
            Error::invalid(format!(
                "{shown}: {why}; write file:///path, s3://bucket/prefix?endpoint=https://host or \
                 weir://coordinator:port/path"
            ))
        };
        if text.len() > URL_MAX {
            return Err(Error::invalid(format!(
                "the URL of a home has {} bytes: at most {URL_MAX}",
                text.len()
            )));
        }
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("this is not a URL of a home"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, path) = place.find('/').map_or((place, ""), |at| place.split_at(at));
        if host.contains('@') {
            return Err(bad("a URL of a home must not contain a user or a secret: use credentials=FILE"));
        }
        let (kind, host) = match scheme {
            "file" if host.is_empty() && path.starts_with('/') => (HomeKind::File, String::new()),
            "file" => return Err(bad("the path must be absolute, after three slashes")),
            "s3" if !host.is_empty() => (HomeKind::S3, host.to_owned()),
            "weir" if !host.is_empty() => (HomeKind::Weir, host.to_ascii_lowercase()),
            "s3" | "weir" => return Err(bad("the host or bucket is missing")),
            _ => return Err(bad("there is no such kind of home")),
        };
        let names = names_of(kind, &unescape(path)?)
            .ok_or_else(|| bad("its path contains `.`, `..` or a zero byte as a name"))?;
        let mut pairs = pairs_of(query).ok_or_else(|| bad("its query is not NAME=VALUE&…"))?;
        pairs.sort();
        let known = |name: &str| QUERIES.iter().any(|(of, names)| *of == kind && names.contains(&name));
        if let Some((name, _)) = pairs.iter().find(|(name, _)| !known(name)) {
            return Err(bad(&format!("{name:?} is not known here")));
        }
        if let Some(twice) = pairs.windows(2).find(|two| two[0].0 == two[1].0) {
            return Err(bad(&format!("{:?} occurs twice", twice[0].0)));
        }
        Ok(HomeUrlParts { kind, host, names, query: pairs })
    }

    /// The query's value for this name.
    pub fn query(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn credentials(&self) -> Option<&str> {
        self.query("credentials")
    }

    /// Whether `url` is this place or lies below it. Credentials do not make another place.
    pub fn covers(&self, url: &HomeUrlParts) -> bool {
        let without_keys = |of: &HomeUrlParts| {
            of.query.iter().filter(|(name, _)| name != "credentials").cloned().collect::<Vec<_>>()
        };
        self.kind == url.kind
            && self.host == url.host
            && without_keys(self) == without_keys(url)
            && url.names.starts_with(&self.names)
    }
}

/// None: a name that could lead elsewhere. Programs between here and an S3 service may resolve `..` in a key.
fn names_of(kind: HomeKind, path: &str) -> Option<Vec<String>> {
    let trimmed = path.trim_matches('/');
    let names = trimmed.split('/').filter(|name| match kind {
        HomeKind::File => !name.is_empty() && *name != ".", // as the kernel resolves them
        HomeKind::S3 | HomeKind::Weir => !trimmed.is_empty(),
    });
    let leads_elsewhere = |name: &str| matches!(name, "." | "..") || name.contains('\0');
    names.map(|name| (!leads_elsewhere(name)).then(|| name.to_owned())).collect()
}

fn pairs_of(query: &str) -> Option<Vec<(String, String)>> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=')?;
            Some((name.to_owned(), unescape(value).ok()?))
        })
        .collect()
}

fn unescape(text: &str) -> Result<String> {
    let bad =
        || Error::invalid(format!("{text:?}: a percent sign is followed by two hexadecimal digits of UTF-8"));
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((b, left)) = rest.split_first() {
        rest = left;
        if *b != b'%' {
            bytes.push(*b);
            continue;
        }
        let hex = rest.get(..2).filter(|hex| hex.iter().all(u8::is_ascii_hexdigit)).ok_or_else(bad)?;
        let hex = std::str::from_utf8(hex).map_err(|_| bad())?;
        bytes.push(u8::from_str_radix(hex, 16).map_err(|_| bad())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_chooses_a_path_chooses_nothing_else() {
        for (url, place, lies) in [
            ("file:///gpfs/home/ada", "file:///gpfs/home", true),
            ("file:///gpfs/home", "file:///gpfs/home/", true),
            ("file:///gpfs//home/./ada", "file:///gpfs/home", true),
            ("file:///gpfs%2fhome/ada", "file:///gpfs/home", true),
            ("file:///any", "file:///", true),
            ("file:///gpfs/homes", "file:///gpfs/home", false),
            ("file:///gpfs/hom", "file:///gpfs/home", false),
            ("file:///gpfs/Home/ada", "file:///gpfs/home", false),
            ("file:///gpfs", "file:///gpfs/home", false),
            ("file:///gpfs/home%20/ada", "file:///gpfs/home", false),
            ("s3://b/p/ada", "s3://b/p", true),
            ("s3://b/ada", "s3://b", true),
            ("s3://b/p/ada?region=r&endpoint=http://h", "s3://b/p?endpoint=http://h&region=r", true),
            ("s3://b/p/ada?endpoint=http://evil", "s3://b/p", false),
            ("s3://b/p/ada", "s3://b/p?endpoint=http://h", false),
            ("s3://b/p/ada?profile=other", "s3://b/p", false),
            ("s3://c/p", "s3://b/p", false),
            ("s3://B/p", "s3://b/p", false),
            ("s3://b.evil/p", "s3://b/p", false),
            ("s3://b/pq", "s3://b/p", false),
            ("s3://b/P", "s3://b/p", false),
            ("s3://b/p//ada", "s3://b/p/ada", false),
            ("weir://h:1/x/y", "weir://h:1/x", true),
            ("weir://H:1/x/y", "weir://h:1/x", true),
            ("weir://h:1/xy", "weir://h:1/x", false),
            ("weir://h:2/x", "weir://h:1/x", false),
            ("weir://h:1,i:1/x/y", "weir://h:1/x", false),
            ("weir://h:1/x?namespace=n", "weir://h:1/x", false),
            ("file:///p", "s3://b", false),
        ] {
            let [url_read, place_read] = [url, place].map(|text| HomeUrlParts::parse(text).unwrap());
            assert_eq!(place_read.covers(&url_read), lies, "{url} in {place}");
        }
    }

    #[test]
    fn a_path_that_could_lead_elsewhere_is_no_url() {
        for text in [
            "file:///gpfs/home/../root",
            "file:///gpfs/home/%2e%2e/root",
            "file:///gpfs/home%2f..%2froot",
            "file:///gpfs/home/%2E./root",
            "file:///gpfs/home/a%00b",
            "s3://b/p/../q",
            "s3://b/p/%2e%2e/q",
            "s3://b/p/./q",
            "weir://h:1/x/../y",
            "FILE:///a",
            "file://localhost/a",
            "file:///a?credentials=/k",
            "s3://b?region=a&region=b",
            "file:///a%2",
            "file:///a%zz",
            "file:///a%ff",
        ] {
            assert!(HomeUrlParts::parse(text).is_err(), "{text}");
        }
        assert!(HomeUrlParts::parse(&format!("file:///{}", "x".repeat(URL_MAX))).is_err());
    }

    #[test]
    fn the_rule_with_the_longest_path_counts() {
        let rules = ["file:///a", "file:///a/b/c", "s3://b/p?endpoint=http://h"].map(HomeRule::plain);
        let of = |url: &str| rule_for(&rules, url).unwrap().map(|rule| rule.place.clone());
        assert_eq!(of("file:///a/b/c/d").as_deref(), Some("file:///a/b/c"));
        assert_eq!(of("file:///a/b").as_deref(), Some("file:///a"));
        assert_eq!(of("file:///b"), None);
        let denied = rule_of_user(&rules, "file:///b", 1000).unwrap_err();
        assert_eq!(denied.kind, crate::ErrorKind::Denied);
        let words =
            "user 1000 may not have the home file:///b: homes of users are allowed only in file:///a, ";
        assert!(denied.context.starts_with(words), "{denied}");
        assert!(rule_of_user(&[], "file:///b", 1000).unwrap_err().context.contains("allowed nowhere"));
        // Credentials do not make another place, and a user does not choose them.
        let with_keys = "s3://b/p/ada?endpoint=http://h&credentials=/root/keys";
        assert!(of(with_keys).is_some());
        assert!(
            rule_of_user(&rules, with_keys, 1000).unwrap_err().context.contains("may not choose the keys")
        );
        rule_of_user(&rules, "s3://b/p/ada?endpoint=http://h", 1000).unwrap();
    }

    #[test]
    fn a_rule_that_cannot_be_followed_is_refused() {
        let plain = HomeRule::plain;
        let user = |name: &str| HomeRule { run_as: Some(name.into()), ..plain("file:///a") };
        let keys = |file: &str, place: &str| HomeRule { credentials: Some(file.into()), ..plain(place) };
        let ids =
            |here, there, count| HomeIds { users: vec![IdMapping { here, there, count }], groups: vec![] };
        let mapped = |ids| HomeRule { ids, ..plain("file:///a") };
        let many = HomeIds { users: vec![], groups: vec![IdMapping { here: 1, there: 1, count: 1 }; 65] };
        let good = [
            plain("file:///a"),
            user("archiver"),
            keys("/etc/keys", "s3://b"),
            mapped(ids(1000, 5000, 100)),
            HomeRule { allow_root: true, ..mapped(ids(1000, 0, 1)) },
        ];
        good.iter().for_each(|rule| rule.check().unwrap());
        for bad in [
            plain("/a"),
            plain("file:///a/../b"),
            plain("file:///a%0ab"),
            plain("s3://b?credentials=/k"),
            user(""),
            user("root"),
            user("a b"),
            user("../x"),
            HomeRule { run_as: Some("ada".into()), ..plain("s3://b") },
            HomeRule { allow_root: true, ..user("ada") },
            HomeRule { keep_setuid: true, ..user("ada") },
            HomeRule { ids: ids(1, 2, 1), ..user("ada") },
            keys("/k", "file:///a"),
            keys("k", "s3://b"),
            mapped(ids(1000, 0, 1)),
            mapped(ids(1, u32::MAX, 1)),
            mapped(many),
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn all_spellings_of_a_place_are_equal() {
        for (one, other) in [("file:///a/b", "file:///a//b/"), ("weir://H:1/x", "weir://h:1/x/")] {
            assert!(is_same_place(one, other), "{one} {other}");
        }
        assert!(!is_same_place("file:///a", "file:///a/b"));
        assert!(!is_same_place("s3://b/p", "s3://b/p?region=r"));
    }
}
