//! Exports of a namespace by its leader: on request of a client, and by schedule into a directory of this
//! machine.
//!
//! Invariants: an export is one state of the store, regardless of later changes; a file gets its name when
//! all of it is durable; the schedule is in the namespace, so it survives restarts and moves with the lead.
//! Knows nothing of the entries' meaning.
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use weir_env::{Env, File, Instant, OpenMode};
use weir_kv::{Engine, Export, Kv};
use weir_meta::export::{PART_BYTES, Totals, Writer};
use weir_meta::keys;
use weir_meta::record::Record;
use weir_meta::restore::ScheduleRecord;
use weir_proto::copies::encode_pairs;
use weir_proto::date::Date;
use weir_proto::export::{
    EXPORT_EVERY_S_MIN, EXPORTS_KEPT_MAX, ExportBegin, ExportBegun, ExportFetch, ExportHead, ExportMade,
    ExportSet, ExportState, GetExports,
};
use weir_proto::meta::Time;
use weir_proto::methods::Method;
use weir_proto::sender::Sender;
use weir_proto::{Error, Request, Result};
use weir_rpc::{Call, Connection, Defer, Handled, Reply, Service};

/// Each one keeps pages of the store from being reused.
const OPEN_MAX: usize = 4;
/// An export that was not fetched from for this long is dropped.
const KEPT_FOR: Duration = Duration::from_secs(300);
/// Pause before a failed export is retried.
const RETRY_PAUSE: Duration = Duration::from_secs(60);
/// File name suffix of exports.
const SUFFIX: &str = ".weir-export";

/// Identifies the namespace.
pub struct Exported {
    pub head: ExportHead,
    pub engine: Arc<Engine>,
}

pub struct Exports {
    env: Env,
    of: Exported,
    open: Mutex<Open>,
    made: Mutex<(Option<ExportMade>, String)>,
    changed: Notify,
}

#[derive(Default)]
struct Open {
    last: u64,
    /// Each with the time of the last fetch.
    of: BTreeMap<u64, (Arc<Export>, Instant)>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Exports {
    pub fn new(env: &Env, of: Exported) -> Arc<Exports> {
        let env = env.clone();
        Arc::new(Exports { env, of, open: Mutex::default(), made: Mutex::default(), changed: Notify::new() })
    }

    /// The present state.
    async fn take(&self) -> Result<(ExportHead, Export)> {
        self.of.engine.checkpoint().await?;
        let export = self.of.engine.export().await?;
        let taken = Time { nanos: self.env.clock.wall().0 };
        Ok((ExportHead { changes: export.seq.0, taken, ..self.of.head.clone() }, export))
    }

    async fn begin(&self) -> Result<ExportBegun> {
        let (head, export) = self.take().await?;
        let now = self.env.clock.now();
        let mut open = locked(&self.open);
        open.of.retain(|_, (_, fetched)| now.since(*fetched) < KEPT_FOR);
        if open.of.len() >= OPEN_MAX {
            return Err(
                Error::unavailable(format!("{OPEN_MAX} exports are being fetched")).hint("try again later")
            );
        }
        open.last += 1;
        let number = open.last;
        open.of.insert(number, (Arc::new(export), now));
        Ok(ExportBegun { export: number, head })
    }

    async fn fetch(&self, asked: ExportFetch) -> Result<Reply> {
        let now = self.env.clock.now();
        let export = match locked(&self.open).of.get_mut(&asked.export) {
            Some((export, fetched)) => {
                *fetched = now;
                export.clone()
            }
            None => return Err(Error::stale("this export is not kept any more").hint("begin another one")),
        };
        let entries = move || export.entries(asked.after.as_deref(), PART_BYTES);
        let pairs = self.env.tasks.blocking(entries).await?;
        if pairs.is_empty() {
            locked(&self.open).of.remove(&asked.export);
        }
        Ok(Reply::with_payload(&(), encode_pairs(&pairs)?))
    }

    fn schedule(&self) -> Result<Option<ScheduleRecord>> {
        let mut value = None;
        self.of.engine.read(&mut |read| {
            value = read.get(&keys::export_schedule())?;
            Ok(())
        })?;
        value.map(|v| ScheduleRecord::from_value(&v, || "the schedule of exports".to_owned())).transpose()
    }

    fn state(&self) -> Result<ExportState> {
        let (last, failure) = locked(&self.made).clone();
        let ScheduleRecord { dir, every_s, keep } =
            self.schedule()?.unwrap_or(ScheduleRecord { dir: String::new(), every_s: 0, keep: 0 });
        Ok(ExportState { dir, every_s, keep, last, failure })
    }

    async fn set(&self, asked: ExportSet) -> Result<ExportState> {
        let ExportSet { dir, every_s, keep } = asked;
        if every_s > 0 {
            let path = Path::new(&dir);
            if !path.is_absolute() || !self.env.disk.exists(path) {
                return Err(Error::invalid(format!("{dir} is not a directory of the metadata machine"))
                    .hint("give the whole path of an existing one, best on another machine's disk"));
            }
            if every_s < EXPORT_EVERY_S_MIN || !(1..=EXPORTS_KEPT_MAX).contains(&keep) {
                return Err(Error::invalid(format!(
                    "exports are made every {EXPORT_EVERY_S_MIN} s at most, and 1 to {EXPORTS_KEPT_MAX} are kept"
                )));
            }
        }
        let record = ScheduleRecord { dir, every_s, keep };
        let done = self.of.engine.transact(&mut |txn| {
            match every_s {
                0 => txn.delete(&keys::export_schedule()),
                _ => txn.put(&keys::export_schedule(), &record.to_value()),
            }
            Ok(())
        })?;
        self.of.engine.wait_durable(done).await?;
        *locked(&self.made) = (None, String::new());
        self.changed.notify_one();
        self.state()
    }

    /// Makes the exports of the schedule, while it is polled.
    pub async fn keep_schedule(&self) {
        loop {
            let pause = match self.schedule() {
                Ok(Some(schedule)) => self.make_if_due(&schedule).await,
                Ok(None) => None,
                Err(e) => Some(self.failed(&e)),
            };
            match pause {
                None => self.changed.notified().await,
                Some(pause) => {
                    let _ = self.env.clock.timeout(pause, self.changed.notified()).await; // checked again either way
                }
            }
        }
    }

    fn failed(&self, e: &Error) -> Duration {
        tracing::error!("the export of the namespace was not made: {e}");
        locked(&self.made).1 = e.to_string();
        RETRY_PAUSE
    }

    /// Returns the time to wait.
    async fn make_if_due(&self, schedule: &ScheduleRecord) -> Option<Duration> {
        let dir = PathBuf::from(&schedule.dir);
        let every = Duration::from_secs(u64::from(schedule.every_s));
        let now = Time { nanos: self.env.clock.wall().0 };
        let newest = match self.exports_in(&dir) {
            Ok(found) => found.last().and_then(|name| self.time_of(name)),
            Err(e) => return Some(self.failed(&e)),
        };
        if let Some(newest) = newest {
            let age = u64::try_from(now.nanos - newest.nanos).unwrap_or(0);
            let left = every.saturating_sub(Duration::from_nanos(age));
            if !left.is_zero() {
                return Some(left);
            }
        }
        match self.make(&dir, schedule.keep).await {
            Ok(made) => {
                tracing::info!("the namespace is exported to {}: {} entries", made.file, made.entries);
                *locked(&self.made) = (Some(made), String::new());
                Some(every)
            }
            Err(e) => Some(self.failed(&e).min(every)),
        }
    }

    /// In the order of their times.
    fn exports_in(&self, dir: &Path) -> Result<Vec<String>> {
        let listed = self.env.disk.read_dir(dir);
        let entries = listed.map_err(|e| Error::from_io(format!("list {}", dir.display()), &e))?;
        let names = entries.into_iter().map(|entry| entry.name);
        Ok(names.filter(|name| self.time_of(name).is_some()).collect())
    }

    fn time_of(&self, name: &str) -> Option<Time> {
        let prefix = format!("{}-", self.of.head.name);
        let date = Date::parse(name.strip_suffix(SUFFIX)?.strip_prefix(&prefix)?)?;
        Some(Time { nanos: date.0.checked_mul(1_000_000_000)? })
    }

    async fn make(&self, dir: &Path, keep: u32) -> Result<ExportMade> {
        let (head, export) = self.take().await?;
        let began = head.taken;
        let file = dir.join(format!("{}-{}{SUFFIX}", head.name, Date::of(began).compact()));
        let (disk, path) = (self.env.disk.clone(), file.clone());
        let write = move || {
            let part = path.with_extension("part");
            let doing = format!("write {}", part.display());
            let io = |e: io::Error| Error::from_io(&doing, &e);
            let opened = disk.open(&part, OpenMode { truncate: true, ..OpenMode::WRITE }).map_err(io)?;
            let totals = write_export(Appending { file: opened.clone(), at: 0 }, &head, &export)?;
            opened.sync_data().map_err(io)?;
            disk.rename(&part, &path).map_err(io)?;
            disk.sync_dir(path.parent().unwrap_or(Path::new("/"))).map_err(io)?;
            Ok::<_, Error>(totals)
        };
        let Totals { entries, bytes } = self.env.tasks.blocking(write).await?;
        let found = self.exports_in(dir)?;
        for old in &found[..found.len().saturating_sub(keep as usize)] {
            if let Err(e) = self.env.disk.remove_file(&dir.join(old)) {
                tracing::warn!("remove the old export {old}: {e}");
            }
        }
        Ok(ExportMade { file: file.display().to_string(), began, entries, bytes })
    }
}

fn write_export(to: Appending, head: &ExportHead, export: &Export) -> Result<Totals> {
    let mut writer = Writer::begin(to, head)?;
    let mut after: Option<Vec<u8>> = None;
    loop {
        let pairs = export.entries(after.as_deref(), PART_BYTES)?;
        let Some((last, _)) = pairs.last() else { break };
        after = Some(last.clone());
        writer.part(&pairs)?;
    }
    Ok(writer.end()?.1)
}

/// Writes a file sequentially from its beginning.
struct Appending {
    file: Arc<dyn File>,
    at: u64,
}

impl io::Write for Appending {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The metadata service, with exports.
pub struct WithExports {
    pub service: Arc<dyn Service>,
    pub exports: Arc<Exports>,
}

impl Service for WithExports {
    fn handle(&self, call: Call) -> Handled {
        let exports = self.exports.clone();
        match call.method {
            ExportBegin::METHOD => Handled::Later(Box::pin(async move {
                call.decode::<ExportBegin>()?;
                Ok(Reply::new(&exports.begin().await?))
            })),
            ExportFetch::METHOD => {
                Handled::Later(Box::pin(async move { exports.fetch(call.decode()?).await }))
            }
            ExportSet::METHOD => {
                Handled::Later(Box::pin(async move { Ok(Reply::new(&exports.set(call.decode()?).await?)) }))
            }
            GetExports::METHOD => {
                let state = call.decode::<GetExports>().and_then(|_| exports.state());
                Handled::Now(state.map(|state| Reply::new(&state)))
            }
            _ => self.service.handle(call),
        }
    }
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match call.method {
            ExportBegin::METHOD | ExportFetch::METHOD | ExportSet::METHOD | GetExports::METHOD => {
                Some(self.handle(call))
            }
            _ => self.service.handle_or_defer(call, defer),
        }
    }
    fn method(&self, number: u16) -> Option<&'static Method> {
        self.service.method(number)
    }
    fn refused(&self, method: &Method, by: &Connection, why: &Error) {
        self.service.refused(method, by, why);
    }
    fn admits_guests(&self) -> bool {
        self.service.admits_guests()
    }
    fn admits_strangers(&self) -> bool {
        self.service.admits_strangers()
    }
    fn payload_max(&self, from: Sender) -> u32 {
        self.service.payload_max(from)
    }
    fn caught_up(&self) {
        self.service.caught_up();
    }
    fn disconnected(&self, connection: &Connection) {
        self.service.disconnected(connection);
    }
}
