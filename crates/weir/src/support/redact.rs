//! Removes names and secrets from texts that leave a site: paths in the file system and its homes, quoted
//! names, keys in addresses, join tokens.
//!
//! Invariant: words that are not known to be harmless are removed. Known are the words of the cluster itself
//! (nodes, volumes, codes) and the directories of the system.
use serde_json::Value;
use std::collections::BTreeSet;

/// Replaces a name.
const NAME: &str = "(name)";
const SECRET: &str = "(secret)";
/// Paths with these prefixes have no user's names in them.
const SYSTEM: [&str; 10] =
    ["/proc", "/sys", "/dev", "/usr", "/etc/weir", "/run/weir", "/var/lib/weir", "/api", "/metrics", "/lib"];
/// Prefixes of secrets.
const MARKS: [&str; 8] =
    ["key=", "secret=", "token=", "password=", "Signature=", "Credential=", "Cookie: ", "cookie: "];

/// Words that may be shown.
#[derive(Default)]
pub struct Known {
    /// Names of nodes, volumes, namespaces.
    pub words: BTreeSet<String>,
    /// Directories of the cluster: the paths below are shown, too.
    pub dirs: Vec<String>,
    /// Mounts and homes: they themselves are shown, the paths below are not.
    pub tops: Vec<String>,
    /// All names may be shown. Secrets may not.
    pub names: bool,
}

impl Known {
    pub fn text(&self, text: &str) -> String {
        let lines: Vec<String> = text.lines().map(|line| self.line(line)).collect();
        lines.join("\n")
    }

    pub fn value(&self, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(all) => all.into_iter().map(|one| self.value(one)).collect(),
            Value::Object(all) => {
                Value::Object(all.into_iter().map(|(key, one)| (self.line(&key), self.value(one))).collect())
            }
            plain => plain,
        }
    }

    fn line(&self, line: &str) -> String {
        let (mut out, mut rest) = (String::new(), line);
        while let Some(c) = rest.chars().next() {
            let begins = out.ends_with(|c: char| c.is_whitespace() || "(,'".contains(c)) || out.is_empty();
            if begins && !self.names && is_relative_path(&rest[..end_of_word(rest)]) {
                out += NAME;
                rest = &rest[end_of_word(rest)..];
            } else if let Some(mark) = MARKS.iter().find(|mark| rest.starts_with(**mark)) {
                out += mark;
                rest = &rest[mark.len()..];
                let end = end_of_word(rest);
                out += if end > 0 { SECRET } else { "" };
                rest = &rest[end..];
            } else if rest.starts_with("weir1.") {
                out += SECRET;
                rest = &rest[end_of_word(rest)..];
            } else if self.names {
                out.push(c);
                rest = &rest[c.len_utf8()..];
            } else if rest == "/s" || rest.starts_with("/s ") || rest.starts_with("/s,") {
                out += "/s"; // a rate
                rest = &rest[2..];
            } else if c == '/' {
                let end = end_of_path(rest);
                out += &self.path(&rest[..end]);
                rest = &rest[end..];
            } else if c == '"' {
                let end = end_of_quoted(rest);
                out += &self.quoted(&rest[..end]);
                rest = &rest[end..];
            } else {
                out.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
        out
    }

    /// From the first slash on; an address has two of them, and its query is removed.
    fn path(&self, path: &str) -> String {
        let path = path.split('?').next().unwrap_or_default();
        let plain = path.trim_start_matches('/');
        let (slashes, plain) = (&path[..path.len() - plain.len()], format!("/{plain}"));
        let slashes = &slashes[slashes.len().min(1)..];
        if plain == "/" || plain.chars().all(|c| c == '/' || c.is_ascii_digit()) {
            return format!("{slashes}{plain}"); // a root, or numbers like 4/6
        }
        let below = |top: &str| {
            let rest = plain.strip_prefix(top)?;
            (rest.is_empty() || rest.starts_with('/')).then(|| rest.to_owned())
        };
        if SYSTEM.iter().any(|dir| below(dir).is_some()) {
            return format!("{slashes}{plain}");
        }
        if let Some((top, rest)) = self.tops.iter().find_map(|top| Some((top, below(top)?))) {
            let name = if rest.is_empty() { String::new() } else { format!("/{NAME}") };
            return format!("{slashes}{top}{name}");
        }
        match self.dirs.iter().any(|dir| below(dir).is_some()) {
            true => format!("{slashes}{plain}"),
            false => format!("{slashes}/{NAME}"),
        }
    }

    fn quoted(&self, quoted: &str) -> String {
        let inner = quoted.trim_matches('"');
        let is_number = inner.chars().all(|c| c.is_ascii_digit() || c == '.');
        if is_number || self.words.contains(inner) {
            return quoted.to_owned();
        }
        match inner.starts_with('/') || inner.contains("://") || inner.starts_with("unix:") {
            true => format!("\"{}\"", self.line(inner)),
            false => format!("\"{NAME}\""),
        }
    }
}

fn is_relative_path(word: &str) -> bool {
    let is_rate = word.ends_with("/s") || word.ends_with("/s,");
    let has_letters = word.chars().any(char::is_alphabetic);
    word.contains('/')
        && !word.starts_with('/')
        && !word.contains(":/")
        && !word.contains("=/")
        && !is_rate
        && has_letters
}

fn end_of_word(text: &str) -> usize {
    text.find(|c: char| c.is_whitespace() || "\"',;&)".contains(c)).unwrap_or(text.len())
}

/// A path ends where the sentence continues. One with spaces in it really ends later: the text after its
/// first word counts as the sentence, so a colon or a quote has to end it.
fn end_of_path(text: &str) -> usize {
    text.find(|c: char| c.is_whitespace() || "\"',;)".contains(c)).unwrap_or(text.len())
}

fn end_of_quoted(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn known() -> Known {
        Known {
            words: ["storage-1", "root", "work"].map(str::to_owned).into(),
            dirs: vec!["/srv/weir".into()],
            tops: vec!["/mnt/beam".into(), "/gpfs/home".into()],
            names: false,
        }
    }

    #[test]
    fn names_and_secrets_go_and_the_words_of_the_cluster_stay() {
        for (text, shown) in [
            ("node \"storage-1\" of \"root\" is down", "node \"storage-1\" of \"root\" is down"),
            ("cannot read \"patient 7.h5\"", "cannot read \"(name)\""),
            ("a \"quote \\\" in it\" ends", "a \"(name)\" ends"),
            ("write /f at home: No space", "write /(name) at home: No space"),
            ("open /mnt/beam/run7/scan.h5: denied", "open /mnt/beam/(name) denied"),
            ("mount at /mnt/beam", "mount at /mnt/beam"),
            ("mount at /mnt/beamline2/x", "mount at /(name)"),
            ("log /srv/weir/log/meta.log", "log /srv/weir/log/meta.log"),
            ("file:///gpfs/home/ada is away", "file:///gpfs/home/(name) is away"),
            ("s3://bucket/x?key=AKIA&secret=s", "s3://(name)"),
            ("unix:/srv/weir/socket/a.sock", "unix:/srv/weir/socket/a.sock"),
            ("/login?key=0123456789abcdef", "/(name)"),
            ("token=abc def password=\"x\"", "token=(secret) def password=\"(name)\""),
            ("run weir join weir1.10.0.0.1:7.aa.bb --dir", "run weir join (secret) --dir"),
            ("24/24 groups, 5 MiB/s", "24/24 groups, 5 MiB/s"),
            ("moved run7/scan.h5 away", "moved (name) away"),
            ("/proc/self/stat", "/proc/self/stat"),
        ] {
            assert_eq!(known().text(text), shown, "{text}");
        }
    }

    #[test]
    fn secrets_go_also_where_names_may_stay() {
        let all = Known { names: true, ..known() };
        let text = "open \"/home/ada/x y\" run7/scan.h5 with key=abc and weir1.h:1.aa.bb";
        assert_eq!(all.text(text), "open \"/home/ada/x y\" run7/scan.h5 with key=(secret) and (secret)");
    }

    #[test]
    fn all_texts_of_a_value_are_cleaned() {
        let value = json!({ "a": ["/home/ada/x", 7], "/home/ada": { "b": "work" } });
        let shown = json!({ "a": ["/(name)", 7], "/(name)": { "b": "work" } });
        assert_eq!(known().value(value), shown);
    }
}
