//! What a relation's target URL says, and what a credentials file says: pure texts, nothing is opened here.
//!
//! `file:///path`, `s3://bucket/prefix?endpoint=URL&region=NAME&path-style=yes&credentials=FILE&profile=NAME`,
//! `weir://coordinator:port[,…]/path?namespace=NAME`. A URL carries no secret: it is shown and kept.
use crate::HomePath;
use std::{
    fmt,
    path::{Component, PathBuf},
};
use weir_proto::{Error, Result};

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HomeUrl {
    File {
        path: PathBuf,
    },
    S3 {
        bucket: String,
        prefix: String,
        /// Absent: Amazon's, of the region.
        endpoint: Option<String>,
        /// Absent: `us-east-1`, which services elsewhere take for any.
        region: Option<String>,
        path_style: bool,
        /// Absent: whoever opens it looks into the environment.
        credentials: Option<PathBuf>,
        profile: String,
    },
    Weir {
        coordinators: Vec<String>,
        namespace: String,
        path: HomePath,
    },
}

/// Who we are at S3.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub access_key: String,
    pub secret_key: String,
    pub token: Option<String>,
}

/// Without the secret.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({})", self.access_key)
    }
}

impl HomeUrl {
    pub fn parse(text: &str) -> Result<HomeUrl> {
        let bad = |why: &str| {
            // Not the text itself where it may hold a secret.
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
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("this is not a URL of a home"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, path) = place.find('/').map_or((place, ""), |at| place.split_at(at));
        if host.contains('@') {
            return Err(bad("a URL of a home must not contain a user or a secret: use credentials=FILE"));
        }
        let mut query = Query::parse(query).ok_or_else(|| bad("its query is not NAME=VALUE&…"))?;
        let url = match scheme {
            "file" if host.is_empty() && path.starts_with('/') => {
                HomeUrl::File { path: unescape(path)?.into() }
            }
            "file" => return Err(bad("the path must be absolute, after three slashes")),
            "s3" if !host.is_empty() => HomeUrl::S3 {
                bucket: host.into(),
                prefix: unescape(path)?.trim_matches('/').into(),
                path_style: query.flag("path-style").ok_or_else(|| bad("path-style is yes or no"))?,
                endpoint: query.take("endpoint"),
                region: query.take("region"),
                credentials: query.take("credentials").map(PathBuf::from),
                profile: query.take("profile").unwrap_or_else(|| "default".into()),
            },
            "weir" if !host.is_empty() => HomeUrl::Weir {
                coordinators: host.split(',').map(str::to_owned).collect(),
                namespace: query.take("namespace").unwrap_or_else(|| "root".into()),
                path: HomePath::parse(unescape(path)?)?,
            },
            "s3" | "weir" => return Err(bad("the host or bucket is missing")),
            _ => return Err(bad("there is no such kind of home")),
        };
        match query.0.first() {
            Some((name, _)) => Err(bad(&format!("{name:?} is not known here"))),
            None => Ok(url),
        }
    }

    /// Whether this is `place` or lies below it; everything but the path is to be the same, so that neither keys nor a service
    /// are chosen by who may only choose a path.
    pub fn lies_in(&self, place: &HomeUrl) -> bool {
        match (self, place) {
            (HomeUrl::File { path }, HomeUrl::File { path: place }) => {
                let goes_up = path.components().any(|part| part == Component::ParentDir);
                !goes_up && path.starts_with(place)
            }
            (HomeUrl::S3 { prefix, .. }, HomeUrl::S3 { prefix: place_prefix, .. }) => {
                let names = |prefix: &str| prefix.split('/').map(str::to_owned).collect::<Vec<_>>();
                let below = place_prefix.is_empty() || names(prefix).starts_with(&names(place_prefix));
                let all_else = |url: &HomeUrl| match url.clone() {
                    HomeUrl::S3 { bucket, endpoint, region, path_style, credentials, profile, .. } => {
                        Some((bucket, endpoint, region, path_style, credentials, profile))
                    }
                    _ => None,
                };
                below && all_else(self) == all_else(place)
            }
            (
                HomeUrl::Weir { coordinators, namespace, path },
                HomeUrl::Weir { coordinators: at, namespace: of, path: place },
            ) => coordinators == at && namespace == of && path.is_within(place),
            _ => false,
        }
    }

    /// Where S3 is spoken to.
    pub fn s3_endpoint(endpoint: Option<&str>, region: &str) -> String {
        endpoint.map_or_else(|| format!("https://s3.{region}.amazonaws.com"), str::to_owned)
    }
}

struct Query(Vec<(String, String)>);

impl Query {
    fn parse(text: &str) -> Option<Query> {
        let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=')?;
            Some((name.to_owned(), unescape(value).ok()?))
        });
        pairs.collect::<Option<Vec<_>>>().map(Query)
    }
    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(n, _)| n == name)?;
        Some(self.0.remove(at).1)
    }
    fn flag(&mut self, name: &str) -> Option<bool> {
        match self.take(name).as_deref() {
            None | Some("no") => Some(false),
            Some("yes") => Some(true),
            Some(_) => None,
        }
    }
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

/// Reads a credentials file as Amazon's tools write it: sections `[profile]` with `aws_access_key_id`,
/// `aws_secret_access_key` and perhaps `aws_session_token`. Errors show no line of it.
pub fn parse_credentials(text: &str, profile: &str) -> Result<Credentials> {
    let (mut inside, mut key, mut secret, mut token) = (false, None, None, None);
    for line in text.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            inside = section.trim() == profile;
        } else if let Some((name, value)) = line.split_once('=').filter(|_| inside) {
            let value = Some(value.trim().to_owned());
            match name.trim() {
                "aws_access_key_id" => key = value,
                "aws_secret_access_key" => secret = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    match (key, secret) {
        (Some(access_key), Some(secret_key)) => Ok(Credentials { access_key, secret_key, token }),
        _ => Err(Error::invalid(format!(
            "the credentials file has no aws_access_key_id and aws_secret_access_key in a section [{profile}]"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_by_table() {
        let s3 = |prefix: &str,
                  endpoint: Option<&str>,
                  region: Option<&str>,
                  path_style,
                  credentials: Option<&str>| HomeUrl::S3 {
            bucket: "b".into(),
            prefix: prefix.into(),
            endpoint: endpoint.map(str::to_owned),
            region: region.map(str::to_owned),
            path_style,
            credentials: credentials.map(PathBuf::from),
            profile: "default".into(),
        };
        let weir = |hosts: &[&str], namespace: &str, path: &str| HomeUrl::Weir {
            coordinators: hosts.iter().map(|h| (*h).to_owned()).collect(),
            namespace: namespace.into(),
            path: HomePath::parse(path).unwrap(),
        };
        for (text, url) in [
            ("file:///a/b%20c", HomeUrl::File { path: "/a/b c".into() }),
            ("s3://b", s3("", None, None, false, None)),
            (
                "s3://b/p/q/?endpoint=http://h:1&region=r&path-style=yes&credentials=/c",
                s3("p/q", Some("http://h:1"), Some("r"), true, Some("/c")),
            ),
            ("weir://h:7000,i:7000/x/y?namespace=n", weir(&["h:7000", "i:7000"], "n", "x/y")),
            ("weir://h:7000", weir(&["h:7000"], "root", "")),
        ] {
            assert_eq!(HomeUrl::parse(text).unwrap(), url, "{text}");
        }
        assert_eq!(HomeUrl::s3_endpoint(None, "eu-west-1"), "https://s3.eu-west-1.amazonaws.com");
        for text in [
            "/a",
            "file://host/a",
            "file://a",
            "s3://",
            "s3:///p",
            "s3://b?speed=high",
            "s3://b?path-style=maybe",
            "ftp://h/a",
            "weir:///a",
            "weir://h/../a",
            "file:///a%2",
            "file:///a%zz",
        ] {
            assert!(HomeUrl::parse(text).is_err(), "{text}");
        }
        let refused = HomeUrl::parse("s3://key:secret@b/p").unwrap_err();
        assert!(!refused.context.contains("secret@") && !refused.context.contains("key:"), "{refused}");
    }

    #[test]
    fn who_may_choose_a_path_chooses_nothing_else() {
        for (url, place, lies) in [
            ("file:///gpfs/home/ada", "file:///gpfs/home", true),
            ("file:///gpfs/home", "file:///gpfs/home/", true),
            ("file:///gpfs/homes", "file:///gpfs/home", false),
            ("file:///gpfs/home/../root", "file:///gpfs/home", false),
            ("file:///gpfs/home/%2e%2e/root", "file:///gpfs/home", false),
            ("s3://b/p/ada?credentials=/k", "s3://b/p?credentials=/k", true),
            ("s3://b/ada", "s3://b", true),
            ("s3://b/p/ada", "s3://b/p?credentials=/k", false),
            ("s3://b/p/ada?credentials=/k", "s3://b/p", false),
            ("s3://b/p/ada?endpoint=http://evil", "s3://b/p", false),
            ("s3://b/p/ada?profile=other", "s3://b/p", false),
            ("s3://c/p", "s3://b/p", false),
            ("s3://b/pq", "s3://b/p", false),
            ("weir://h:1/x/y", "weir://h:1/x", true),
            ("weir://h:1,i:1/x/y", "weir://h:1/x", false),
            ("weir://h:1/x?namespace=n", "weir://h:1/x", false),
            ("file:///p", "s3://b", false),
        ] {
            let [url_read, place_read] = [url, place].map(|text| HomeUrl::parse(text).unwrap());
            assert_eq!(url_read.lies_in(&place_read), lies, "{url} in {place}");
        }
    }

    #[test]
    fn credentials_are_found_by_profile_and_never_shown() {
        let text = "[other]\naws_access_key_id=no\naws_secret_access_key=no\n\n[default]\n# mine\n\
                    aws_access_key_id = KEY\naws_secret_access_key = SECRET=1\n";
        let found = parse_credentials(text, "default").unwrap();
        assert_eq!((&*found.access_key, &*found.secret_key, found.token.clone()), ("KEY", "SECRET=1", None));
        assert!(!format!("{found:?}").contains("SECRET"));
        let missing = parse_credentials(text, "third").unwrap_err();
        assert!(!missing.context.contains("SECRET"));
    }
}
