//! The log of a role on standard error: text for people, with priorities for the journal, or a JSON object on
//! each line. A background process's goes to a file, which it rotates.
use serde_json::{Map, Value};
use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;
use weir_admin::config::LogFormat;
use weir_admin::rotation::Rotation;

/// The format of this process's lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lines {
    /// With the time, and colours on a terminal.
    Text,
    /// With a priority, which the journal strips; it has the time itself.
    Journal,
    Json,
}

/// Set when a role's log begins.
static LINES: OnceLock<Lines> = OnceLock::new();

/// The number of lines kept for `weir support`, and the bytes of each.
const KEPT_LINES: usize = 200;
const KEPT_LINE_BYTES: usize = 500;
static KEPT: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());
/// Absent: standard error is not a file of this process.
static FILE: Mutex<Option<Rotation>> = Mutex::new(None);

/// The log file that `weir up` gave to this process.
#[derive(Clone)]
pub struct LogFile {
    pub path: PathBuf,
    pub bytes_max: u64,
}

/// Standard error, with the last lines kept.
struct Tee;

impl std::io::Write for Tee {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        for line in String::from_utf8_lossy(bytes).lines() {
            if kept.len() >= KEPT_LINES {
                kept.pop_front();
            }
            kept.push_back(line.chars().take(KEPT_LINE_BYTES).collect());
        }
        drop(kept);
        // One line at a time, so that none is written to a file that was renamed.
        let mut file = FILE.lock().unwrap_or_else(PoisonError::into_inner);
        std::io::stderr().write_all(bytes)?;
        if let Some(Err(e)) = file.as_mut().map(|file| file.wrote(bytes.len())) {
            let _ = writeln!(std::io::stderr(), "{}", last_words(&e, None)); // there is no other place
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

/// The last lines of this process's log.
pub fn last_lines() -> String {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.iter().map(|line| format!("{line}\n")).collect()
}

/// Begins the log. `journal`: the variable JOURNAL_STREAM.
pub fn start(wanted: &str, format: LogFormat, journal: Option<&str>, file: Option<LogFile>) {
    let rotated = file.map(|file| Rotation::of(file.path, file.bytes_max));
    *FILE.lock().unwrap_or_else(PoisonError::into_inner) = rotated;
    let filter = EnvFilter::try_new(wanted).unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = match format {
        LogFormat::Json => Lines::Json,
        LogFormat::Text if is_journal(journal) => Lines::Journal,
        LogFormat::Text => Lines::Text,
    };
    let lines = *LINES.get_or_init(|| lines);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Tee);
    let _ = match lines {
        Lines::Text => log.with_ansi(std::io::stderr().is_terminal()).try_init(),
        Lines::Journal => log.with_ansi(false).event_format(Prioritized).try_init(),
        Lines::Json => log.with_ansi(false).event_format(Json).try_init(),
    }; // a second call keeps the first
}

/// The error with which the process ends, in the form of its log.
pub fn last_words(failure: &str, journal: Option<&str>) -> String {
    match LINES.get() {
        Some(Lines::Json) => {
            let mut time = String::new();
            let _ = SystemTime.format_time(&mut Writer::new(&mut time)); // the line is complete without it
            let message = failure.strip_prefix("error: ").unwrap_or(failure);
            Value::Object(head(time, Level::ERROR, "weir", message.into())).to_string()
        }
        Some(Lines::Text) => failure.to_owned(),
        Some(Lines::Journal) => prioritized(Level::ERROR, failure),
        None if is_journal(journal) => prioritized(Level::ERROR, failure),
        None => failure.to_owned(),
    }
}

/// Whether standard error is the journal's: the variable names the device and inode that systemd opened.
fn is_journal(variable: Option<&str>) -> bool {
    let Some((device, inode)) = variable.and_then(|text| text.split_once(':')) else { return false };
    let Ok(stat) = rustix::fs::fstat(std::io::stderr()) else { return false };
    device.parse() == Ok(stat.st_dev) && inode.parse() == Ok(stat.st_ino)
}

/// The priority in the numbering of syslog(3).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Each line becomes an entry of the journal, so each has the priority.
fn prioritized(level: Level, text: &str) -> String {
    let lines = text.lines().map(|line| format!("<{}>{line}", priority(level)));
    lines.collect::<Vec<_>>().join("\n")
}

struct Prioritized;

impl<S, N> FormatEvent<S, N> for Prioritized
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, cx: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut text = format!("{}: ", event.metadata().target());
        cx.format_fields(Writer::new(&mut text), event)?;
        writeln!(to, "{}", prioritized(*event.metadata().level(), &text))
    }
}

struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let about = event.metadata();
        let mut line = head(time, *about.level(), about.target(), fields.message.into());
        if !fields.others.is_empty() {
            line.insert("fields".into(), Value::Object(fields.others));
        }
        writeln!(to, "{}", Value::Object(line))
    }
}

fn head(time: String, level: Level, target: &str, message: Value) -> Map<String, Value> {
    let level = level.as_str().to_lowercase();
    let pairs =
        [("time", time.into()), ("level", level.into()), ("target", target.into()), ("message", message)];
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        self.others.insert(field.name().to_owned(), value);
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => write!(self.message, "{value:?}").unwrap_or_default(),
            _ => self.put(field, format!("{value:?}").into()),
        }
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message.push_str(value),
            _ => self.put(field, value.into()),
        }
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::{Arc, Mutex, PoisonError};
    use tracing_subscriber::fmt::MakeWriter;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    impl<'a> MakeWriter<'a> for Written {
        type Writer = Written;
        fn make_writer(&'a self) -> Written {
            self.clone()
        }
    }
    impl Written {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    fn say() {
        tracing::warn!(target: "weir_x", node = "s1", count = 3, "two lines:\n\"and\" a quote");
        tracing::error!(target: "weir_x", "it failed");
    }

    #[test]
    fn every_line_for_the_journal_has_its_priority() {
        let written = Written::default();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(written.clone());
        tracing::subscriber::with_default(log.event_format(Prioritized).finish(), say);
        assert_eq!(
            written.text(),
            "<4>weir_x: two lines:\n<4>\"and\" a quote node=\"s1\" count=3\n<3>weir_x: it failed\n"
        );
        assert_eq!(prioritized(Level::ERROR, "error: a\nhint: b"), "<3>error: a\n<3>hint: b");
    }

    #[test]
    fn a_json_line_holds_the_message_and_its_fields() {
        let written = Written::default();
        let log = tracing_subscriber::fmt().with_ansi(false).with_writer(written.clone());
        tracing::subscriber::with_default(log.event_format(Json).finish(), say);
        let text = written.text();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(lines[0]["message"], "two lines:\n\"and\" a quote");
        assert_eq!(lines[0]["level"], "warn");
        assert_eq!(lines[0]["fields"], serde_json::json!({ "node": "s1", "count": 3 }));
        assert!(lines[0]["time"].as_str().unwrap().ends_with('Z'), "{text}");
        assert_eq!(lines[1].get("fields"), None);
    }

    #[test]
    fn only_the_stream_of_the_variable_is_the_journal() {
        let stat = rustix::fs::fstat(std::io::stderr()).unwrap();
        let own = format!("{}:{}", stat.st_dev, stat.st_ino);
        assert!(is_journal(Some(&own)));
        for other in [None, Some(""), Some("x"), Some("1:2:3"), Some("8:1")] {
            assert!(!is_journal(other), "{other:?}");
        }
    }
}
