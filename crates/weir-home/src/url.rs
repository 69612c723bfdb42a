//! Parses a relation's target URL and a credentials file: pure text functions, no I/O.
//!
//! `file:///path`,
//! `s3://bucket/prefix?endpoint=URL&region=NAME&path-style=yes&credentials=FILE&profile=NAME`,
//! `weir://coordinator:port[,…]/path?namespace=NAME`. A URL carries no secret: it is displayed and stored.
use crate::HomePath;
use std::{fmt, path::PathBuf};
use weir_proto::home_rule::{HomeKind, HomeUrlParts};
use weir_proto::{Error, Result};

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HomeUrl {
    File {
        path: PathBuf,
    },
    S3 {
        bucket: String,
        prefix: String,
        /// Absent: Amazon's endpoint of the region.
        endpoint: Option<String>,
        /// Absent: `us-east-1`, which other services accept as any region.
        region: Option<String>,
        path_style: bool,
        /// Absent: the caller that opens it uses the environment.
        credentials: Option<PathBuf>,
        profile: String,
    },
    Weir {
        coordinators: Vec<String>,
        namespace: String,
        path: HomePath,
        /// The file with a certificate of that cluster, if it requires one.
        credentials: Option<PathBuf>,
    },
}

/// S3 credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub access_key: String,
    pub secret_key: String,
    pub token: Option<String>,
}

/// Omits the secret.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({})", self.access_key)
    }
}

impl HomeUrl {
    pub fn parse(text: &str) -> Result<HomeUrl> {
        let parts = HomeUrlParts::parse(text)?;
        let named = |name: &str| parts.query(name).map(str::to_owned);
        Ok(match parts.kind {
            HomeKind::File => HomeUrl::File { path: format!("/{}", parts.names.join("/")).into() },
            HomeKind::S3 => HomeUrl::S3 {
                prefix: parts.names.join("/"),
                path_style: match parts.query("path-style") {
                    None | Some("no") => false,
                    Some("yes") => true,
                    Some(_) => return Err(Error::invalid(format!("{text}: path-style is yes or no"))),
                },
                endpoint: named("endpoint"),
                region: named("region"),
                credentials: named("credentials").map(PathBuf::from),
                profile: named("profile").unwrap_or_else(|| "default".into()),
                bucket: parts.host,
            },
            HomeKind::Weir => HomeUrl::Weir {
                namespace: named("namespace").unwrap_or_else(|| "root".into()),
                path: HomePath::parse(parts.names.join("/"))?,
                credentials: named("credentials").map(PathBuf::from),
                coordinators: parts.host.split(',').map(str::to_owned).collect(),
            },
        })
    }

    /// The S3 endpoint.
    pub fn s3_endpoint(endpoint: Option<&str>, region: &str) -> String {
        endpoint.map_or_else(|| format!("https://s3.{region}.amazonaws.com"), str::to_owned)
    }
}

/// Reads a credentials file in the format of Amazon's tools: sections `[profile]` with `aws_access_key_id`,
/// `aws_secret_access_key` and optionally `aws_session_token`. Errors show no line of it.
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
        let weir = |hosts: &[&str], namespace: &str, path: &str, file: Option<&str>| HomeUrl::Weir {
            coordinators: hosts.iter().map(|h| (*h).to_owned()).collect(),
            namespace: namespace.into(),
            path: HomePath::parse(path).unwrap(),
            credentials: file.map(PathBuf::from),
        };
        for (text, url) in [
            ("file:///a/b%20c", HomeUrl::File { path: "/a/b c".into() }),
            ("s3://b", s3("", None, None, false, None)),
            (
                "s3://b/p/q/?endpoint=http://h:1&region=r&path-style=yes&credentials=/c",
                s3("p/q", Some("http://h:1"), Some("r"), true, Some("/c")),
            ),
            ("weir://h:7000,i:7000/x/y?namespace=n", weir(&["h:7000", "i:7000"], "n", "x/y", None)),
            ("weir://h/x?credentials=/node.pem", weir(&["h"], "root", "x", Some("/node.pem"))),
            ("weir://h:7000", weir(&["h:7000"], "root", "", None)),
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
            "file:///a/../b",
            "weir://h:7000/a//b",
        ] {
            assert!(HomeUrl::parse(text).is_err(), "{text}");
        }
        let refused = HomeUrl::parse("s3://key:secret@b/p").unwrap_err();
        assert!(!refused.context.contains("secret@") && !refused.context.contains("key:"), "{refused}");
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
