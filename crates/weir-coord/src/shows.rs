//! A process's answers to the coordinator about itself; the coordinator asks over the connection that the
//! process has opened.
//!
//! Invariant: an answer has a bounded size, for any amount of reports. Knows nothing of the meters'
//! meaning.
use std::sync::Arc;
use weir_env::Env;
use weir_proto::watch::{
    ANSWER_BYTES_MAX, Fact, Facts, GetFacts, GetHistory, GetMeters, GetTop, ListWaits, Meter, MeterBucket,
    MeterKind, Meters, NodeReply, ROWS_MAX, SeriesRead, Top, TopRow, WaitSeen, WaitsListed,
};
use weir_proto::{Error, Request, Result, Wire};
use weir_rpc::{Call, Handled, Reply, Service};
use weir_watch::{KEPT_NS, Kind, Reading, Row, WaitRecord, Watch, bucket_bound};

const MS_NS: u64 = 1_000_000;

/// Answers the coordinator's calls back.
pub struct Shows(Env);

impl Shows {
    pub fn of(env: &Env) -> Arc<dyn Service> {
        Arc::new(Shows(env.clone()))
    }
}

impl Service for Shows {
    fn handle(&self, call: Call) -> Handled {
        Handled::Now(shown(&self.0.watch, call.method, &call.body).map(|reply| Reply::new(&reply)))
    }
    fn payload_max(&self, _from: weir_proto::sender::Sender) -> u32 {
        0
    }
}

/// The answer of this process.
pub fn shown(watch: &Watch, method: u16, body: &[u8]) -> Result<NodeReply> {
    let body = match method {
        GetMeters::METHOD => GetMeters::from_bytes(body).map(|_| meters(watch))?,
        ListWaits::METHOD => waits(watch, &ListWaits::from_bytes(body)?).to_bytes(),
        GetTop::METHOD => top(watch, &GetTop::from_bytes(body)?).to_bytes(),
        GetHistory::METHOD => history(watch, &GetHistory::from_bytes(body)?).to_bytes(),
        GetFacts::METHOD => GetFacts::from_bytes(body).map(|_| facts(watch).to_bytes())?,
        _ => return Err(Error::unsupported(format!("method {method} is not served here"))),
    };
    let name = watch.name.get().cloned().unwrap_or_default();
    Ok(NodeReply { process: watch.process, name, body: body.into() })
}

/// As much as fits.
fn facts(watch: &Watch) -> Facts {
    let all = watch.facts.get().map(|facts| facts()).unwrap_or_default();
    let mut left = ANSWER_BYTES_MAX / 2;
    let mut facts = Vec::new();
    for (name, mut text) in all {
        let mut keep = left.saturating_sub(name.len() + 16).min(text.len());
        while !text.is_char_boundary(keep) {
            keep -= 1;
        }
        text.truncate(keep);
        left = left.saturating_sub(name.len() + 16 + keep);
        facts.push(Fact { name, text });
    }
    facts.truncate(ROWS_MAX);
    Facts { facts }
}

fn meters(watch: &Watch) -> Vec<u8> {
    let mut meters: Vec<Meter> = watch.meters.read().into_iter().map(meter).collect();
    for (reason, count, ns) in watch.waits.totals().filter(|(_, count, _)| *count > 0) {
        let of = |name: &str, value: u64| Meter {
            name: name.to_owned(),
            label: "reason".to_owned(),
            label_value: reason.word().to_owned(),
            kind: MeterKind::Counter,
            value: value as i64,
            count: 0,
            buckets: Vec::new(),
        };
        meters.extend([of("weir_waits_total", count), of("weir_wait_seconds_total", ns)]);
    }
    let all = Meters { meters };
    let encoded = all.to_bytes();
    if encoded.len() <= ANSWER_BYTES_MAX {
        return encoded;
    }
    // With many meters, at least counts and sums.
    let plain = |meter: Meter| Meter { buckets: Vec::new(), ..meter };
    Meters { meters: all.meters.into_iter().map(plain).collect() }.to_bytes()
}

fn meter(read: Reading) -> Meter {
    let buckets =
        read.buckets.iter().map(|(at, count)| MeterBucket { below: bucket_bound(*at), count: *count });
    Meter {
        name: read.name.to_owned(),
        label: read.label.0.to_owned(),
        label_value: read.label.1,
        kind: match read.kind {
            Kind::Counter => MeterKind::Counter,
            Kind::Gauge => MeterKind::Gauge,
            Kind::Histogram => MeterKind::Histogram,
        },
        value: read.value,
        count: read.count,
        buckets: buckets.collect(),
    }
}

fn waits(watch: &Watch, asked: &ListWaits) -> WaitsListed {
    let (now, min_ns) = (watch.now_ns(), u64::from(asked.min_ms) * MS_NS);
    let mut listed: Vec<WaitSeen> =
        watch.waits.list(now, min_ns).iter().map(|(record, age)| wait(record, *age, 0)).collect();
    listed.truncate(ROWS_MAX);
    let since = now.saturating_sub(u64::from(asked.since_s) * 1000 * MS_NS);
    let ended = match asked.since_s {
        0 => Vec::new(),
        _ => watch.waits.list_ended(since, min_ns.max(KEPT_NS)),
    };
    let ago = |ended_ns: u64| (now.saturating_sub(ended_ns) / MS_NS).max(1);
    let ended = ended.iter().take(ROWS_MAX - listed.len());
    let ended = ended.map(|ended| wait(&ended.record, ended.lasted_ns, ago(ended.ended_ns))).collect();
    WaitsListed { now: listed, ended }
}

fn wait(record: &WaitRecord, lasted_ns: u64, ended_ms: u64) -> WaitSeen {
    WaitSeen {
        reason: record.reason.word().to_owned(),
        object: record.object.kind.to_owned(),
        object_id: record.object.id,
        action: record.action.to_owned(),
        holder: record.holder.as_deref().unwrap_or_default().to_owned(),
        peer: record.peer.as_deref().unwrap_or_default().to_owned(),
        uid: record.uid,
        pid: record.pid,
        lasted_us: lasted_ns / 1000,
        ended_ms,
    }
}

fn top(watch: &Watch, asked: &GetTop) -> Top {
    let (rows, covered_ns) = watch.tops.list(watch.now_ns(), u64::from(asked.seconds));
    let row = |row: &Row| TopRow {
        volume: row.volume,
        uid: row.uid,
        job: row.job.to_string(),
        kind: row.kind.to_owned(),
        requests: row.requests,
        bytes: row.bytes,
        us: row.ns / 1000,
    };
    Top { covered_ms: covered_ns / MS_NS, rows: rows.iter().map(row).collect() }
}

fn history(watch: &Watch, asked: &GetHistory) -> SeriesRead {
    let count = asked.points as usize;
    let read = match asked.by_minute {
        true => watch.history.minutes(&asked.name, count),
        false => watch.history.seconds(&asked.name, count),
    };
    let names = match asked.name.is_empty() {
        true => watch.history.names(),
        false => Vec::new(),
    };
    let points = read.map_or_else(Vec::new, |(points, _)| points);
    SeriesRead { names, points: points.into_iter().map(f32::to_bits).collect() }
}
