//! The mover's own keys for S3, found in the environment as Amazon's tools find them.
//!
//! The first place counts that the environment names: keys, a web identity, a credentials file, the service
//! of a container, the metadata service of a virtual machine. That last one needs a variable that allows it:
//! in a facility's own network any machine may answer at its address.
use rustix::fs::{Mode, OFlags};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weir_home::{Credentials, KeySource, Lender, Token, parse_credentials};
use weir_proto::{Error, ErrorKind, Result};

const CONTAINER_SERVICE: &str = "http://169.254.170.2";
const INSTANCE_SERVICE: &str = "http://169.254.169.254";

/// `variable`: the value of a variable of the environment.
pub fn of_environment(variable: impl Fn(&str) -> Option<String>) -> Option<KeySource> {
    let named = |name: &str| variable(name).filter(|value| !value.is_empty());
    if let (Some(access_key), Some(secret_key)) = (named("AWS_ACCESS_KEY_ID"), named("AWS_SECRET_ACCESS_KEY"))
    {
        let token = named("AWS_SESSION_TOKEN");
        return Some(KeySource::Fixed(Credentials { access_key, secret_key, token }));
    }
    if let (Some(file), Some(role)) = (named("AWS_WEB_IDENTITY_TOKEN_FILE"), named("AWS_ROLE_ARN")) {
        let region = named("AWS_REGION").or_else(|| named("AWS_DEFAULT_REGION"));
        let usual = || match region {
            Some(region) => format!("https://sts.{region}.amazonaws.com"),
            None => "https://sts.amazonaws.com".to_owned(),
        };
        let endpoint = named("AWS_ENDPOINT_URL_STS").unwrap_or_else(usual);
        let session = named("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| "weir".to_owned());
        return Some(KeySource::Lent(Lender::WebIdentity { endpoint, role, session, token: text_of(file) }));
    }
    let (file, profile) = (named("AWS_SHARED_CREDENTIALS_FILE"), named("AWS_PROFILE"));
    if file.is_some() || profile.is_some() {
        let usual = || named("HOME").map(|home| format!("{home}/.aws/credentials"));
        let profile = profile.unwrap_or_else(|| "default".to_owned());
        return Some(of_file(file.or_else(usual)?.into(), profile, read_keys));
    }
    let relative =
        named("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").map(|path| format!("{CONTAINER_SERVICE}{path}"));
    if let Some(url) = relative.or_else(|| named("AWS_CONTAINER_CREDENTIALS_FULL_URI")) {
        let given = named("AWS_CONTAINER_AUTHORIZATION_TOKEN");
        let given = given.map(|token| -> Token { Arc::new(move || Ok(token.clone())) });
        let token = named("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").map(text_of).or(given);
        return Some(KeySource::Lent(Lender::Container { url, token }));
    }
    let endpoint = named("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    let is_allowed = named("AWS_EC2_METADATA_DISABLED").is_some_and(|no| no.eq_ignore_ascii_case("false"));
    let endpoint = endpoint.or_else(|| is_allowed.then(|| INSTANCE_SERVICE.to_owned()))?;
    Some(KeySource::Lent(Lender::Instance { endpoint }))
}

/// Keys of a file, which is read again from time to time.
pub fn of_file(
    file: PathBuf,
    profile: String,
    read: impl Fn(&Path) -> Result<String> + Send + Sync + 'static,
) -> KeySource {
    KeySource::Read(Arc::new(move || parse_keys(&file, &read(&file)?, &profile)))
}

pub fn read_keys(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).map_err(|e| {
        Error::denied(format!(
            "the credentials file {} of a home cannot be read here: {e}; it must be on every node with a mover",
            file.display()
        ))
    })
}

pub fn parse_keys(file: &Path, text: &str, profile: &str) -> Result<Credentials> {
    parse_credentials(text, profile).map_err(|e| e.of_kind(ErrorKind::Denied).doing(file.display()))
}

/// A file that others can change or read must hold no keys. The opened file is checked, not its path.
pub fn read_private(path: &Path) -> Result<String> {
    let unread = |e: std::io::Error| {
        Error::denied(format!(
            "the credentials file {} of a rule cannot be read here: {e}; it must be on every node with a mover",
            path.display()
        ))
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| unread(e.into()))?;
    let mut file = std::fs::File::from(file);
    let (own, found) = (rustix::process::geteuid().as_raw(), file.metadata().map_err(unread)?);
    if !found.is_file() || found.uid() != own || found.mode() & 0o077 != 0 {
        return Err(Error::denied(format!(
            "the credentials file {} must be a file of user {own}, whom the mover runs as, that others cannot read: chown {own} \
             and chmod 600",
            path.display()
        )));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(unread)?;
    Ok(text)
}

fn text_of(file: String) -> Token {
    Arc::new(move || {
        let read = std::fs::read_to_string(&file);
        read.map_err(|e| Error::denied(format!("the token for keys of S3 in {file} cannot be read: {e}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> String {
        let value =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        match of_environment(value) {
            None => "none".into(),
            Some(KeySource::Fixed(keys)) => format!("{keys:?} {:?}", keys.token),
            Some(KeySource::Read(read)) => format!("file: {:?}", read().map_err(|e| e.context)),
            Some(KeySource::Lent(Lender::Container { url, token })) => {
                format!("{url} {:?}", token.map(|token| token().map_err(|e| e.context)))
            }
            Some(KeySource::Lent(Lender::Instance { endpoint })) => endpoint,
            Some(KeySource::Lent(Lender::WebIdentity { endpoint, role, session, .. })) => {
                format!("{endpoint} {role} {session}")
            }
        }
    }

    #[test]
    fn the_first_place_that_the_environment_names_counts() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("credentials");
        std::fs::write(&file, "[p]\naws_access_key_id = of-file\naws_secret_access_key = s\n").unwrap();
        let file = file.to_str().unwrap();
        let all = [
            ("AWS_ACCESS_KEY_ID", "k"),
            ("AWS_SECRET_ACCESS_KEY", "s"),
            ("AWS_SESSION_TOKEN", "t"),
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/none"),
            ("AWS_ROLE_ARN", "arn:role"),
            ("AWS_REGION", "eu-x"),
            ("AWS_SHARED_CREDENTIALS_FILE", file),
            ("AWS_PROFILE", "p"),
            ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/x"),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN", "Bearer 1"),
            ("AWS_EC2_METADATA_DISABLED", "False"),
        ];
        assert_eq!(found(&all), "Credentials(k) Some(\"t\")");
        assert_eq!(
            found(&all[1..]),
            "https://sts.eu-x.amazonaws.com arn:role weir",
            "a key without its secret"
        );
        assert_eq!(found(&all[6..]), "file: Ok(Credentials(of-file))");
        assert_eq!(found(&all[8..]), "http://169.254.170.2/v2/x Some(Ok(\"Bearer 1\"))");
        assert_eq!(found(&all[10..]), "http://169.254.169.254");
        assert_eq!(found(&[("AWS_EC2_METADATA_DISABLED", "true"), ("HOME", "/root")]), "none");
        assert_eq!(found(&[("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", "")]), "none");
        let missing = found(&[("AWS_PROFILE", "p"), ("HOME", "/no-home")]);
        assert!(missing.contains("/no-home/.aws/credentials"), "{missing}");
    }
}
