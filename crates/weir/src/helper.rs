//! Calls of mount(8): a line of fstab, a mount unit of systemd, `mount -t fuse.weir SOURCE DIRECTORY`, `mount
//! -o remount`.
//!
//! mount(8) leaves file systems of the type `fuse.weir` to `/sbin/mount.fuse.weir`, which is a link to this
//! program, and if that is missing to `/sbin/mount.fuse`, which calls `weir SOURCE DIRECTORY -o OPTIONS`.
//! Either way the options are those of fstab, not of this command line. The call returns when the file system
//! is mounted; its process continues in the background.
use rustix::mount::MountFlags;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_admin::failure::{Doing, Failure, Outcome, did_you_mean};
use weir_admin::local::local_cluster::LocalCluster;
use weir_admin::local::process::{Launch, Program};
use weir_env::Addr;
use weir_proto::Error;

/// Names of the link by which mount(8) finds this program.
pub const HELPERS: [&str; 2] = ["mount.fuse.weir", "mount.weir"];
/// Sources that name no coordinator: the options `cluster` and `config` do, or the machine's own file.
const NO_SOURCE: [&str; 2] = ["weir", "none"];
/// A source `weir:/DIRECTORY` names the directory to show, and no coordinator either.
const SHOWN: &str = "weir:";
/// The common settings of a machine's mounts: the node's name and its cluster.
const MACHINE_CONFIG: &str = "/etc/weir/mount.toml";
/// A mount that does not answer by then has failed. The process itself waits half of it for a coordinator.
const READY_PATIENCE: Duration = Duration::from_secs(60);
/// The option with a coordinator's address, or the directory of a cluster of this machine; may be given
/// several times.
const CLUSTER: &str = "cluster";
/// How long an address may take until nothing is known of it.
const CONNECT_PATIENCE: Duration = Duration::from_millis(500);
const RUN_DIR: &str = "/run/weir";
const LOG_DIR: &str = "/var/log/weir";

/// Options for mount(8) itself or for systemd, and those that are always true for a mount of Weir.
const IGNORED: &[&str] = &[
    "",
    "_netdev",
    "auto",
    "default_permissions",
    "defaults",
    "dev",
    "group",
    "loud",
    "noauto",
    "nodev",
    "nofail",
    "nosuid",
    "nouser",
    "owner",
    "silent",
    "suid",
    "user",
    "users",
];

/// The options after `-o`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountWords {
    pub read_only: bool,
    pub no_exec: bool,
    pub no_atime: bool,
    pub allow_other: bool,
    remount: bool,
    /// For a remount: the kernel's flags. Flags that are not named get the default of mounts.
    flags: MountFlags,
    /// `KEY=VALUE`: options of `weir mount` by their long names.
    named: Vec<(String, String)>,
    unknown: Option<String>,
}

impl MountWords {
    pub fn parse(options: &str) -> Outcome<MountWords> {
        let mut words = MountWords {
            read_only: false,
            no_exec: false,
            no_atime: false,
            allow_other: false,
            remount: false,
            flags: MountFlags::empty(),
            named: Vec::new(),
            unknown: None,
        };
        for option in options.split(',') {
            words.take(option)?;
        }
        // A remount also names the options that the kernel shows of the mount.
        match words.unknown.take().filter(|_| !words.remount) {
            None => Ok(words),
            Some(word) => Err(Failure::new(
                Error::invalid(format!("{word:?} is not an option of a mount of Weir")),
                "ro, noexec, noatime, allow_other, and options of `weir mount` as KEY=VALUE",
            )),
        }
    }

    /// Each is an option of `weir mount`, by its long name, or the one of this helper.
    fn check_named(&self, known: &[String]) -> Outcome<()> {
        let known: Vec<&str> = known.iter().map(String::as_str).chain([CLUSTER]).collect();
        let Some((key, _)) = self.named.iter().find(|(key, _)| !known.contains(&key.as_str())) else {
            return Ok(());
        };
        let hint = match did_you_mean(key, known.iter().copied()) {
            Some(near) => format!("did you mean {near}=…?"),
            None => format!("known are {}=", known.join("=, ")),
        };
        Err(Failure::new(Error::invalid(format!("{key}=… is not an option of a mount of Weir")), hint))
    }

    /// The last option of a kind counts.
    fn take(&mut self, option: &str) -> Outcome<()> {
        let (flag, on) = match option {
            "ro" | "rw" => (MountFlags::RDONLY, option == "ro"),
            "nosuid" | "suid" => (MountFlags::NOSUID, option == "nosuid"),
            "nodev" | "dev" => (MountFlags::NODEV, option == "nodev"),
            "noexec" | "exec" => (MountFlags::NOEXEC, option == "noexec"),
            "noatime" | "atime" | "relatime" => (MountFlags::NOATIME, option == "noatime"),
            "nodiratime" | "diratime" => (MountFlags::NODIRATIME, option == "nodiratime"),
            "lazytime" | "nolazytime" => (MountFlags::LAZYTIME, option == "lazytime"),
            "nosymfollow" | "symfollow" => (MountFlags::NOSYMFOLLOW, option == "nosymfollow"),
            "sync" | "async" => (MountFlags::SYNCHRONOUS, option == "sync"),
            _ => (MountFlags::empty(), false),
        };
        self.flags.set(flag, on);
        match option {
            "remount" => self.remount = true,
            "ro" | "rw" => self.read_only = on,
            "noexec" | "exec" => self.no_exec = on,
            "noatime" | "atime" | "relatime" => self.no_atime = option == "noatime",
            "allow_other" => self.allow_other = true,
            // The kernel's flags alone.
            "nodiratime" | "diratime" | "lazytime" | "nolazytime" | "nosymfollow" | "symfollow" | "sync"
            | "async" => {}
            ignored if IGNORED.contains(&ignored) => {}
            // For the program that mounts: `x-systemd.automount` and similar.
            other if other.starts_with("x-") || other.starts_with("X-") || other.starts_with("comment=") => {}
            "strictatime" => {
                return Err(Failure::new(
                    Error::unsupported(
                        "strictatime: reads that the kernel answers by itself change no access time",
                    ),
                    "relatime, which is the default, or noatime",
                ));
            }
            other => match other.split_once('=') {
                Some((key, value)) => self.named.push((key.into(), value.into())),
                None => self.unknown = Some(other.into()),
            },
        }
        Ok(())
    }

    /// The kernel's flags of a mount with options that the kernel does not take when it mounts FUSE; `None`:
    /// it has none of these.
    pub fn flags_beyond(&self) -> Option<MountFlags> {
        let beyond =
            MountFlags::NODIRATIME | MountFlags::LAZYTIME | MountFlags::NOSYMFOLLOW | MountFlags::SYNCHRONOUS;
        let always = MountFlags::NOSUID | MountFlags::NODEV;
        self.flags.intersects(beyond).then_some(self.flags | always)
    }

    /// An error for options that only mount(8) can act on.
    pub fn of_command(&self) -> Outcome<()> {
        let named = self.named.first().map(|(key, value)| format!("{key}={value}"));
        match named.or(self.remount.then(|| "remount".into())) {
            None => Ok(()),
            Some(word) => Err(Failure::new(
                Error::invalid(format!("-o {word} is for mount(8) and fstab")),
                "`weir mount --help` lists the options of this command",
            )),
        }
    }
}

/// A call of mount(8).
#[derive(Debug, PartialEq, Eq)]
pub struct Call {
    source: Option<String>,
    directory: PathBuf,
    options: String,
}

impl Call {
    /// `None`: these are not its arguments. `arguments` without the program's name.
    pub fn parse(program: &OsStr, arguments: &[OsString]) -> Option<Call> {
        let name = Path::new(program).file_name()?;
        match HELPERS.iter().any(|helper| name == *helper) {
            true => Call::of_helper(arguments),
            false => Call::of_program(arguments),
        }
    }

    /// `SOURCE DIRECTORY [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`.
    fn of_helper(arguments: &[OsString]) -> Option<Call> {
        let (mut places, mut options) = (Vec::new(), Vec::new());
        let mut rest = arguments.iter();
        while let Some(word) = rest.next() {
            match word.to_str() {
                Some("-o") => options.push(rest.next()?.to_string_lossy().into_owned()),
                Some("-t" | "-N") => drop(rest.next()),
                Some(flags) if flags.starts_with('-') => {}
                _ => places.push(word),
            }
        }
        let [source, directory] = places.as_slice() else { return None };
        Some(Call {
            source: Some(source.to_string_lossy().into_owned()),
            directory: directory.into(),
            options: options.join(","),
        })
    }

    /// `[SOURCE] DIRECTORY -o OPTIONS`, of mount.fuse.
    fn of_program(arguments: &[OsString]) -> Option<Call> {
        let (source, directory, flag, options) = match arguments {
            [directory, flag, options] => (None, directory, flag, options),
            [source, directory, flag, options] => (Some(source), directory, flag, options),
            _ => return None,
        };
        let is_ours = flag == "-o"
            && !arguments[0].to_string_lossy().starts_with('-')
            && source.is_none_or(|source| source != "mount")
            && Path::new(directory).is_absolute();
        is_ours.then(|| Call {
            source: source.map(|source| source.to_string_lossy().into_owned()),
            directory: directory.into(),
            options: options.to_string_lossy().into_owned(),
        })
    }

    /// `known`: options of `weir mount` that have a value.
    pub fn run(&self, known: &[String]) -> Outcome<()> {
        let words = MountWords::parse(&self.options)?;
        if words.remount {
            return Ok(weir_fuse::remount(&self.directory, words.flags)?);
        }
        words.check_named(known)?;
        let launch = self.launch(&words)?;
        check_reach(&launch.args)?;
        for dir in [RUN_DIR, LOG_DIR] {
            fs::create_dir_all(dir).doing(format_args!("make {dir} for the mount's process"))?;
        }
        weir_fuse::preflight(&self.directory)?;
        let log_before = fs::metadata(&launch.log).map_or(0, |m| m.len());
        let mut child = launch.start()?;
        let ready = launch.wait_ready(&mut child, log_before, READY_PATIENCE);
        if ready.is_err() {
            let _ = child.kill(); // it may have ended
        }
        ready.map(drop)
    }

    fn launch(&self, words: &MountWords) -> Outcome<Launch> {
        let source = self.source.as_deref().unwrap_or(NO_SOURCE[0]);
        let mut args = vec!["mount".to_owned(), self.directory.display().to_string()];
        args.extend(["--source".into(), source.into()]);
        let is_named = |name: &str| words.named.iter().any(|(key, _)| key == name);
        let shown = source.strip_prefix(SHOWN);
        args.extend(shown.into_iter().flat_map(|dir| ["--top".to_owned(), dir.to_owned()]));
        let mut places = if shown.is_some() { Vec::new() } else { coordinators(source)? };
        for (_, value) in words.named.iter().filter(|(key, _)| key == CLUSTER) {
            places.extend(coordinators(value)?);
        }
        let has_place =
            !places.is_empty() || is_named("config") || is_named("coordinator") || is_named("dir");
        if !has_place && Path::new(MACHINE_CONFIG).exists() {
            places.extend(["--config".into(), MACHINE_CONFIG.into()]);
        } else if !has_place {
            return Err(Failure::new(
                Error::invalid(format!("{source} does not name a cluster to mount")),
                format!(
                    "-o cluster=HOST:PORT, -o cluster=DIRECTORY of `weir up`, -o config=FILE, or a file {MACHINE_CONFIG}"
                ),
            ));
        }
        args.extend(places);
        let plain: Vec<&str> = self.options.split(',').filter(|word| !word.contains('=')).collect();
        args.extend(["-o".into(), plain.join(",")]);
        let named = words.named.iter().filter(|(key, _)| key != CLUSTER);
        args.extend(named.flat_map(|(key, value)| [format!("--{key}"), value.clone()]));
        let name = self.directory.to_string_lossy().trim_matches('/').replace('/', "-");
        Ok(Launch {
            program: Program::Weir,
            args,
            pid_file: Path::new(RUN_DIR).join(format!("mount-{name}.pid")),
            log: Path::new(LOG_DIR).join(format!("mount-{name}.log")),
        })
    }
}

/// Checks the coordinators that a mount is to use before it waits for them: a directory without a cluster,
/// and a host that no name service knows, are errors. A coordinator that does not listen may start, as at a
/// boot of all machines: the mount waits for it, with a warning.
fn check_reach(args: &[String]) -> Outcome<()> {
    let pairs = || args.windows(2).map(|pair| (pair[0].as_str(), pair[1].as_str()));
    for (_, dir) in pairs().filter(|(option, _)| *option == "--dir") {
        LocalCluster::open(Path::new(dir))?;
    }
    let named: Vec<&str> =
        pairs().filter(|(option, _)| *option == "--coordinator").map(|(_, at)| at).collect();
    let mut silent = Vec::new();
    for text in &named {
        match reach(text) {
            Reach::Listens => return Ok(()),
            Reach::Silent(why) => silent.push(format!("{text}: {why}")),
            Reach::Unknown(why) => {
                let error = Error::invalid(format!("{CLUSTER}={text}: {why}"));
                return Err(Failure::new(error, "correct the name of the coordinator's host"));
            }
        }
    }
    if !silent.is_empty() {
        eprintln!(
            "warning: no coordinator listens yet ({}): the mount waits for one for 30 s",
            silent.join("; ")
        );
    }
    Ok(())
}

enum Reach {
    Listens,
    Silent(String),
    /// No name service knows the host.
    Unknown(String),
}

fn reach(text: &str) -> Reach {
    use std::net::{TcpStream, ToSocketAddrs};
    let connect = |at: &SocketAddr| TcpStream::connect_timeout(at, CONNECT_PATIENCE).map(drop);
    let addrs = match text.parse() {
        Ok(Addr::Tcp(at)) => vec![at],
        Ok(Addr::Host(host, port)) => match (host.as_str(), port).to_socket_addrs() {
            Ok(addrs) => addrs.collect(),
            // "Temporary failure in name resolution": the network may not be up yet.
            Err(e) if e.to_string().contains("Temporary") => return Reach::Silent(e.to_string()),
            Err(e) => return Reach::Unknown(e.to_string()),
        },
        Ok(Addr::Unix(path)) => {
            let connected = std::os::unix::net::UnixStream::connect(path);
            return connected.map_or_else(|e| Reach::Silent(e.to_string()), |_| Reach::Listens);
        }
        Err(e) => return Reach::Unknown(e),
    };
    let mut last = "it has no address".to_owned();
    for at in &addrs {
        match connect(at) {
            Ok(()) => return Reach::Listens,
            Err(e) => last = e.to_string(),
        }
    }
    Reach::Silent(last)
}

/// The source in the form of `weir mount`: the directory of a cluster of this machine, or addresses with
/// commas between them, `tcp:` unless they have another prefix.
fn coordinators(source: &str) -> Outcome<Vec<String>> {
    if NO_SOURCE.contains(&source) {
        return Ok(Vec::new());
    }
    if source.starts_with('/') {
        return Ok(vec!["--dir".into(), source.into()]);
    }
    let mut args = Vec::new();
    for part in source.split(',') {
        let address = part.parse::<Addr>().or_else(|_| format!("tcp:{part}").parse::<Addr>());
        let address = address.map_err(|e| {
            let hint = "the source of a mount is HOST:PORT of a coordinator, several with commas between them, or a directory of `weir up`";
            Failure::new(Error::invalid(format!("the source {source}: {e}")), hint)
        })?;
        args.extend(["--coordinator".into(), address.to_string()]);
    }
    Ok(args)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(program: &str, words: &[&str]) -> Option<Call> {
        Call::parse(OsStr::new(program), &words.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_words_of_mount_differ_from_those_of_this_program() {
        assert!(call("/usr/bin/weir", &["weir", "/mnt", "-o", "rw,remount"]).is_some());
        assert!(call("weir", &["/mnt", "-o", "rw,remount"]).is_some());
        for words in [
            &["up", "-o", "rw"][..],
            &["mount", "/mnt", "-o", "ro"],
            &["mount", "/mnt", "--dir", "x"],
            &["status"],
        ] {
            assert_eq!(call("weir", words), None, "{words:?}");
        }
        let helper =
            call("/sbin/mount.fuse.weir", &["h:1", "/mnt", "-n", "-o", "rw,noexec", "-t", "fuse.weir"]);
        assert_eq!(
            helper,
            Some(Call { source: Some("h:1".into()), directory: "/mnt".into(), options: "rw,noexec".into() })
        );
        assert_eq!(call("mount.weir", &["-h"]), None);
    }

    #[test]
    fn the_last_word_counts_and_unknown_ones_are_refused() {
        let words = |options| MountWords::parse(options).unwrap();
        assert!(!words("rw,nosuid").remount);
        assert_eq!(words("rw,nodev,remount,ro").flags, MountFlags::NODEV | MountFlags::RDONLY);
        assert_eq!(words("remount,ro,rw,suid,unheard_of").flags, MountFlags::empty());
        let boot = words("defaults,_netdev,nofail,x-systemd.automount,ro,noexec,dev,suid,memory-mib=512");
        assert!(boot.read_only && boot.no_exec && !boot.no_atime);
        assert_eq!(boot.named, [("memory-mib".to_string(), "512".to_string())]);
        assert!(boot.of_command().is_err() && words("ro").of_command().is_ok());
        for refused in ["strictatime", "dirsync", "remount,strictatime"] {
            assert!(MountWords::parse(refused).is_err(), "{refused}");
        }
        let known = ["memory-mib", "name"].map(String::from);
        let refused = words("cluster=x,memroy-mib=1").check_named(&known).unwrap_err();
        assert_eq!(refused.error.hint.unwrap(), "did you mean memory-mib=…?");
        assert!(words("cluster=x,name=n").check_named(&known).is_ok());
    }

    /// Lines of fstab that work with every other file system.
    #[test]
    fn options_that_every_file_system_takes_are_taken() {
        let words = |options| MountWords::parse(options).unwrap();
        let all = words("defaults,nodiratime,lazytime,sync,silent,nosymfollow,noatime,_netdev");
        assert!(all.of_command().is_ok() && all.no_atime);
        let flags = MountFlags::NODIRATIME | MountFlags::LAZYTIME | MountFlags::SYNCHRONOUS;
        let expected = flags | MountFlags::NOSYMFOLLOW | MountFlags::NOATIME;
        assert_eq!(all.flags_beyond(), Some(expected | MountFlags::NOSUID | MountFlags::NODEV));
        let none = words("nodiratime,diratime,lazytime,nolazytime,sync,async,nosymfollow,symfollow,loud,ro");
        assert_eq!(none.flags_beyond(), None, "the last word counts");
        assert_eq!(words("remount,nosymfollow").flags, MountFlags::NOSYMFOLLOW);
    }

    #[test]
    fn a_wrong_cluster_is_refused_at_once() {
        let check = |option: &str, value: &str| check_reach(&[option.to_owned(), value.to_owned()]);
        let dir = tempfile::tempdir().unwrap();
        let refused = check("--dir", dir.path().to_str().unwrap()).unwrap_err();
        assert!(refused.to_string().contains("is not the directory of a cluster"), "{refused}");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("tcp:{}", listener.local_addr().unwrap());
        assert!(matches!(reach(&at), Reach::Listens));
        check("--coordinator", &at).unwrap();
        drop(listener);
        assert!(matches!(reach(&at), Reach::Silent(_)), "it may start later");
        check("--coordinator", &at).unwrap();
        // Top-level names that are reserved for this never exist (RFC 6761).
        let unknown = reach("tcp:no-such-host.invalid:7000");
        let is_seen = match &unknown {
            Reach::Unknown(_) => true,
            Reach::Silent(why) => why.contains("Temporary"), // this machine has no name service
            Reach::Listens => false,
        };
        assert!(is_seen);
    }

    #[test]
    fn a_source_may_name_a_directory_and_an_option_the_cluster() {
        let args = |source: &str, options: &str| {
            let call = Call { source: Some(source.into()), directory: "/m".into(), options: options.into() };
            let launch = call.launch(&MountWords::parse(options).unwrap()).map_err(|e| e.to_string());
            launch.map(|launch| launch.args[4..].join(" "))
        };
        let asked =
            "--top /vol --coordinator tcp:10.0.0.1:7 --coordinator tcp:10.0.0.2:7 -o ro --memory-mib 64";
        assert_eq!(
            args("weir:/vol", "cluster=10.0.0.1:7,ro,cluster=10.0.0.2:7,memory-mib=64").unwrap(),
            asked
        );
        assert_eq!(args("weir:/", "cluster=/srv/w").unwrap(), "--top / --dir /srv/w -o ");
        assert_eq!(args("weir", "config=/etc/w.toml").unwrap(), "-o  --config /etc/w.toml");
        if !Path::new(MACHINE_CONFIG).exists() {
            assert!(args("weir:/", "ro").unwrap_err().contains("cluster=HOST:PORT"));
        }
        assert!(args("weir:/", "cluster=nonsense").unwrap_err().contains("HOST:PORT"));
    }

    #[test]
    fn a_source_is_a_directory_or_coordinators() {
        let args = |source| coordinators(source).map(|args| args.join(" ")).map_err(|e| e.to_string());
        assert_eq!(args("/srv/weir").unwrap(), "--dir /srv/weir");
        assert_eq!(args("10.0.0.1:7000").unwrap(), "--coordinator tcp:10.0.0.1:7000");
        assert_eq!(
            args("unix:/run/c,tcp:[::1]:5").unwrap(),
            "--coordinator unix:/run/c --coordinator tcp:[::1]:5"
        );
        assert_eq!(args("weir").unwrap(), "");
        assert!(args("nonsense").unwrap_err().contains("HOST:PORT"));
    }
}
