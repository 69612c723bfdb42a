//! `weir.toml`: the settings of one process. Settings that every node must agree on are in the cluster map.
//!
//! Each key is declared once, with its documentation and default; `weir config reference` prints exactly
//! that. A wrong line is an error that names the file, the line and the key.
use crate::failure::{Failure, Outcome, did_you_mean};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{fmt, path::PathBuf, str::FromStr, time::Duration};
use weir_client::ClientConfig;
use weir_coord::etcd::{EtcdConfig, StorePlace};
use weir_env::Addr;
use weir_fuse::Transport;
use weir_proto::map::{Scheme, Settings};
use weir_proto::network::Network;
use weir_proto::{ClusterId, Error, ErrorKind};

/// A value that is written in the file as the text that it displays as.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Text<T>(pub T);
impl<T: fmt::Display> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&self.0)
    }
}
impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?.parse().map(Text).map_err(serde::de::Error::custom)
    }
}

/// How long calls wait for servers that do not answer: `30s`, `10m`, `2h` or `forever`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Patience(pub Duration);

impl FromStr for Patience {
    type Err = String;
    fn from_str(text: &str) -> Result<Patience, String> {
        if text == "forever" {
            return Ok(Patience(ClientConfig::FOREVER));
        }
        match crate::times::parse_seconds(text).map_err(|e| format!("{e}, or forever"))? {
            0 => Err(format!("{text:?}: a call needs at least 1s")),
            seconds => Ok(Patience(Duration::from_secs(seconds.into()).min(ClientConfig::FOREVER))),
        }
    }
}
impl fmt::Display for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ClientConfig::FOREVER => f.write_str("forever"),
            patience => write!(f, "{}s", patience.as_secs()),
        }
    }
}

/// How lines of the log are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

impl FromStr for LogFormat {
    type Err = String;
    fn from_str(text: &str) -> Result<LogFormat, String> {
        match text {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(format!("{text:?} is not a log format: expected text or json")),
        }
    }
}
impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        })
    }
}

/// One documented key, for `weir config reference`.
pub struct Key {
    pub name: &'static str,
    pub doc: &'static [&'static str],
    pub default: &'static str,
}

macro_rules! sections {
    ($( $(#[doc = $about:literal])* [$section:ident] $name:ident {
        $( $(#[doc = $doc:literal])* $key:ident: $type:ty = $default:expr, shown $shown:literal; )*
    } )*) => {
        $(
            $(#[doc = $about])*
            #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $name { $( $(#[doc = $doc])* pub $key: $type, )* }
            impl Default for $name {
                fn default() -> Self {
                    $name { $( $key: $default, )* }
                }
            }
        )*
        /// All keys of a file.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Config { $( $(#[doc = $about])* pub $section: $name, )* }

        /// Sections in order: name, what it is for, keys.
        pub const SECTIONS: &[(&str, &[&str], &[Key])] = &[
            $( (stringify!($section), &[$($about),*], &[
                $( Key { name: stringify!($key), doc: &[$($doc),*], default: $shown }, )*
            ]), )*
        ];
    };
}

sections! {
    /// The cluster that the process belongs to.
    [cluster] Cluster {
        /// The cluster's id, 32 hexadecimal digits. The coordinator makes one when it is founded (`weir coord
        /// --new`); other roles refuse a cluster with another id.
        id: Option<Text<ClusterId>> = None, shown "\"0123456789abcdef0123456789abcdef\" # an example; default: the coordinator's";
        /// Where the coordinators listen, best first: "unix:/PATH" or "tcp:HOST:PORT". A coordinator gives
        /// the TCP addresses among them to the nodes that join.
        coordinators: Vec<Text<Addr>> = Vec::new(), shown "[]";
    }
    /// The process itself, whatever its role. `weir mover` has no other keys.
    [node] Node {
        /// Its name, unique in the cluster.
        name: String = String::new(), shown "\"storage-1\" # an example; default: the role and the host's name";
        /// Where it listens: "unix:/PATH", "tcp:HOST:PORT", "tcp:[IPv6]:PORT"; port 0 is any free port. For
        /// an unspecified host ("[::]", "0.0.0.0") the address by which this host reaches the coordinator is
        /// announced.
        listen: Vec<Text<Addr>> = Vec::new(), shown "[\"tcp:[::]:0\"]";
        /// A Unix socket that every user of this machine may connect to, for commands about that user's
        /// volumes: "/PATH". Only of `weir coord`, `weir meta` and `weir mount`. Through other Unix sockets,
        /// too, they grant others no more than that.
        door: Option<PathBuf> = None, shown "\"/run/weir/door.sock\" # an example; default: none";
        /// The node's certificate with its private key, as `weir join` wrote it. Over networks only nodes
        /// of the cluster can then connect, and every frame is protected. Without it a role listens on this
        /// machine only.
        certificate: PathBuf = PathBuf::new(), shown "\"/srv/weir/node.pem\" # an example; default: none";
        /// Networks in which frames are protected against changes but not encrypted; elsewhere they are
        /// encrypted, too.
        trusted_networks: Vec<Text<Network>> = trusted_networks(),
            shown "[\"127.0.0.0/8\", \"::1\", \"10.0.0.0/8\", \"172.16.0.0/12\", \"192.168.0.0/16\", \"fc00::/7\", \"fe80::/10\"]";
        /// Encrypt with AES-128-GCM everywhere and with nothing else, for sites that must. All nodes need
        /// the same.
        only_aes: bool = false, shown "false";
        /// The host. Processes that name the same host reach each other through Unix sockets.
        host: String = String::new(), shown "\"host-1\" # an example; default: the machine's name and id";
        /// What fails with this host, as one: data is spread over racks where there are several.
        rack: String = String::new(), shown "\"rack-1\" # an example; default: none";
        /// Threads that serve requests.
        threads: usize = 2, shown "2";
        /// How much is logged on standard error: "error", "warn", "info", "debug" or "trace", also per
        /// module.
        log: String = "info".into(), shown "\"info\"";
        /// Form of these lines: "text", or "json" for one object on each line.
        log_format: Text<LogFormat> = Text(LogFormat::Text), shown "\"text\"";
    }
    /// Of `weir coord`.
    [coord] Coord {
        /// Directory of the cluster map, or, if that is in etcd, of this coordinator's audit log.
        dir: PathBuf = PathBuf::new(), shown "\"/srv/weir/coord\" # an example; required";
        /// Where the cluster map is: "directory", or "etcd:http://HOST:PORT,http://HOST:PORT". Several
        /// coordinators can share an etcd: one of them leads, the others wait until they can.
        store: Text<StorePlace> = Text(StorePlace::Directory), shown "\"directory\"";
        /// Nodes need certificates to connect over networks. So it is in any case when the coordinator
        /// listens beyond this machine, and once it was so.
        certificates: bool = false, shown "false";
        /// Targets to wait for before the first placement groups are made.
        targets: u32 = 6, shown "6";
        /// How new files are protected: "ec:K+M", "replica:N" or "single".
        scheme: Text<Scheme> = Text(Scheme { data: 4, parity: 2 }), shown "\"ec:4+2\"";
        /// Bytes of one target's part of a stripe, in KiB; a power of two from 64 to 4096.
        cell_kib: u32 = 512, shown "512";
        /// A client that is silent this long loses its leases, in milliseconds.
        lease_ms: u32 = 10_000, shown "10000";
        /// A target that is silent this long is down, in milliseconds. One whose process died is down at
        /// once.
        target_silence_ms: u32 = 3_000, shown "3000";
    }
    /// How `weir coord` reaches the etcd that coord.store names.
    [etcd] EtcdAccess {
        /// What the names of all keys begin with: one etcd can serve several clusters.
        prefix: String = "/weir/".into(), shown "\"/weir/\"";
        /// Certificates of the authority that signs etcd's servers, in PEM.
        ca: PathBuf = PathBuf::new(), shown "\"/srv/weir/etcd-ca.pem\" # an example; default: the authorities of the web";
        /// The certificate that the coordinator shows to etcd, in PEM.
        certificate: PathBuf = PathBuf::new(), shown "\"/srv/weir/etcd-client.pem\" # an example; default: none";
        /// Its private key, in PEM.
        key: PathBuf = PathBuf::new(), shown "\"/srv/weir/etcd-client.key\" # an example; default: none";
    }
    /// Of `weir meta`.
    [meta] Meta {
        /// Directory of the namespace.
        dir: PathBuf = PathBuf::new(), shown "\"/srv/weir/meta\" # an example; required";
        /// The namespace it leads.
        namespace: String = "root".into(), shown "\"root\"";
        /// Memory for the namespace's cache, in MiB.
        cache_mib: u64 = 128, shown "128";
    }
    /// Of `weir storage`.
    [storage] Storage {
        /// Directories of its targets.
        targets: Vec<PathBuf> = Vec::new(), shown "[\"/srv/weir/t1\"] # an example; required";
        /// The pool that its targets belong to.
        pool: String = "default".into(), shown "\"default\"";
        /// Directories of targets of other processes on this machine. Targets on one file system count as
        /// equal parts of its free space; this process's own need not be listed here.
        others: Vec<PathBuf> = Vec::new(), shown "[]";
    }
    /// Of `weir mount`.
    [mount] Mount {
        /// The mount point.
        path: PathBuf = PathBuf::new(), shown "\"/weir\" # an example; required";
        /// The namespace to show there.
        namespace: String = "root".into(), shown "\"root\"";
        /// The directory of the namespace to show, like "/volume".
        top: String = "/".into(), shown "\"/\"";
        /// Memory for unsaved and cached data, in MiB. Writers wait when it is used up.
        memory_mib: u64 = 512, shown "512";
        /// How requests come from the kernel: "uring" by io_uring, which has to be switched on in the kernel;
        /// "dev" by /dev/fuse; "auto" by io_uring where the kernel offers it.
        transport: Text<Transport> = Text(Transport::Dev), shown "\"dev\"";
        /// Threads that take requests from /dev/fuse; one does beside io_uring. More of them than processors
        /// make small files slower.
        kernel_threads: Option<usize> = None, shown "4 # default: as many as this machine has processors, from 2 to 4";
        /// The kernel keeps names, present and absent, for 0.2 s while this mount holds their directory's
        /// lease, so that paths in use cost next to no requests. A change by another mount waits for that, at
        /// most 0.3 s and seldom. False: the kernel asks for each name each time, and nothing waits.
        kernel_names: bool = true, shown "true";
        /// This mount creates and removes files by itself in directories that no other mount uses, and the
        /// server answers changes of names before its disk has them. They are durable after fsync of the
        /// file or of its directory, and within a second. False: when the call returns.
        local_creates: bool = true, shown "true";
        /// Let other users in (permissions are always checked). FUSE lets root do so, and others where
        /// /etc/fuse.conf says user_allow_other.
        allow_other: Option<bool> = None, shown "true # default: whether this user may let others in";
        /// How long calls wait for servers that do not answer, and written bytes are kept for them, before
        /// programs get errors: "30s", "10m", "2h" or "forever".
        patience: Text<Patience> = Text(Patience(ClientConfig::MOUNT_PATIENCE)), shown "\"10m\"";
        /// Mount read-only.
        read_only: bool = false, shown "false";
    }
}

fn trusted_networks() -> Vec<Text<Network>> {
    weir_rpc::Policy::default().trusted.into_iter().map(Text).collect()
}

/// The settings of a new cluster.
pub fn settings(coord: &Coord) -> Settings {
    Settings {
        scheme: coord.scheme.0,
        cell_shift: (coord.cell_kib * 1024).trailing_zeros() as u8,
        lease_ms: coord.lease_ms,
        target_silence_ms: coord.target_silence_ms,
    }
}

impl EtcdAccess {
    /// For the etcd with these endpoints.
    pub fn at(&self, endpoints: &[String]) -> EtcdConfig {
        EtcdConfig {
            endpoints: endpoints.to_vec(),
            prefix: self.prefix.clone(),
            ca: self.ca.clone(),
            certificate: self.certificate.clone(),
            key: self.key.clone(),
        }
    }
}

/// Parses the text of a file; errors call it `name`.
pub fn parse(name: &str, text: &str) -> Outcome<Config> {
    toml::from_str(text).map_err(|e| wrong_line(name, text, &e))
}

/// A file in the schema's form.
pub fn write(config: &Config) -> Outcome<String> {
    toml::to_string(config).map_err(|e| Error::invalid(format!("write the configuration: {e}")).into())
}

fn wrong_line(name: &str, text: &str, e: &toml::de::Error) -> Failure {
    let start = e.span().map_or(0, |span| span.start.min(text.len()));
    let before = text.get(..start).unwrap_or("");
    let line_number = before.matches('\n').count() + 1;
    let line = text.lines().nth(line_number - 1).unwrap_or("").trim();
    let key = line.split(['=', '#']).next().unwrap_or("").trim();
    let message = e.message().lines().next().unwrap_or("cannot be read");
    let place = if key.is_empty() { String::new() } else { format!(" {key}:") };
    let text = format!("{name}:{line_number}:{place} {message}");
    let error = Error::of_text(ErrorKind::Invalid, text);
    // "unknown field `x`, expected one of `a`, `b`": every second part is a quoted word.
    let mut quoted = message.split('`').skip(1).step_by(2);
    let known = quoted.next().and_then(|unknown| did_you_mean(unknown, quoted));
    Failure::new(
        error,
        match known {
            Some(near) if message.starts_with("unknown") => format!("did you mean {near:?}?"),
            _ => "`weir config reference` prints every key with its default".to_string(),
        },
    )
}

/// Checks that types cannot express: ranges. Errors call the file `name`.
pub fn check(name: &str, config: &Config) -> Outcome<()> {
    let bad = |key: &str, why: String| {
        let hint = "`weir config reference` prints every key with its default";
        let text = format!("{name}: {key}: {why}");
        Err(Failure::new(Error::of_text(ErrorKind::Invalid, text), hint))
    };
    let cell = config.coord.cell_kib;
    if !cell.is_power_of_two() || !(64..=4096).contains(&cell) {
        return bad("coord.cell_kib", format!("{cell} is not a power of two from 64 to 4096"));
    }
    if !(1..=256).contains(&config.node.threads) {
        return bad("node.threads", format!("{} is not from 1 to 256", config.node.threads));
    }
    if let Some(n) = config.mount.kernel_threads.filter(|n| !(1..=64).contains(n)) {
        return bad("mount.kernel_threads", format!("{n} is not from 1 to 64"));
    }
    if config.mount.memory_mib < 32 {
        return bad("mount.memory_mib", format!("{} is less than 32", config.mount.memory_mib));
    }
    if config.etcd.certificate.as_os_str().is_empty() != config.etcd.key.as_os_str().is_empty() {
        return bad("etcd.certificate", "it and etcd.key belong together".to_owned());
    }
    if config.coord.lease_ms < 1000 {
        return bad("coord.lease_ms", format!("{} is less than 1000", config.coord.lease_ms));
    }
    Ok(())
}

/// A file with every key, commented out, at its default.
pub fn reference() -> String {
    let mut out = String::from("# weir.toml: every key with its default.\n");
    for (section, about, keys) in SECTIONS {
        out += "\n";
        about.iter().for_each(|line| out += &format!("#{line}\n"));
        out += &format!("[{section}]\n");
        for key in *keys {
            key.doc.iter().for_each(|line| out += &format!("#{line}\n"));
            out += &format!("# {} = {}\n", key.name, key.default);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_means_the_defaults_and_they_survive_writing() {
        let config = parse("weir.toml", "").unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(parse("weir.toml", &write(&config).unwrap()).unwrap(), config);
        check("weir.toml", &config).unwrap();
    }

    #[test]
    fn a_wrong_line_is_named_with_what_was_meant() {
        let cases = [
            (
                "[mount]\nmemroy_mib = 4\n",
                "f:2: memroy_mib: unknown field `memroy_mib`",
                "did you mean \"memory_mib\"?",
            ),
            (
                "[coord]\n\nscheme = \"ec:4\"\n",
                "f:3: scheme: scheme \"ec:4\": expected",
                "weir config reference",
            ),
            ("[coordd]\n", "f:1: [coordd]: unknown field", "did you mean \"coord\"?"),
            ("[node]\nthreads = \"x\"\n", "f:2: threads: invalid type", "weir config reference"),
            ("[node]\nlisten = [\"udp:1\"]\n", "f:2: listen: address \"udp:1\"", "weir config reference"),
            ("[node\n", "f:1:", "weir config reference"),
        ];
        for (text, error, hint) in cases {
            let failure = parse("f", text).unwrap_err();
            assert!(failure.error.context.starts_with(error), "{text:?}: {}", failure.error.context);
            assert!(failure.parts().1.unwrap().contains(hint), "{text:?}: {failure}");
        }
    }

    #[test]
    fn patience_is_written_with_its_unit() {
        let read = |text: &str| text.parse::<Patience>().map(|p| p.0.as_secs()).ok();
        assert_eq!((read("30s"), read("10m"), read("2h")), (Some(30), Some(600), Some(7200)));
        assert!(read("forever") > read("1000h") && read("99999999999999999999h").is_none());
        assert_eq!(read("1h30m"), Some(5400));
        for wrong in ["", "m", "0s", "-1s", "10 x", "ever"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
        for text in ["90s", "forever"] {
            assert_eq!(text.parse::<Patience>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_reference_is_a_valid_file_that_changes_nothing() {
        let text = reference();
        assert_eq!(parse("reference", &text).unwrap(), Config::default());
        assert!(text.contains("# memory_mib = 512"));
        // A key is a line of its own, which takes effect without its comment mark.
        let is_key = |line: &&str| line.starts_with("# ") && line.contains(" = ") && !line.contains('`');
        let lines = text.lines().map(|line| if is_key(&line) { &line[2..] } else { line });
        let used = lines.collect::<Vec<_>>().join("\n");
        let config = parse("reference", &used).unwrap();
        check("reference", &config).unwrap();
        let keys = SECTIONS.iter().map(|(.., keys)| keys.len()).sum::<usize>();
        let written = used.lines().filter(|line| !line.starts_with('#') && line.contains(" = ")).count();
        assert_eq!(written, keys, "{used}");
        assert_eq!(config.coord.dir, PathBuf::from("/srv/weir/coord"));
    }
}
