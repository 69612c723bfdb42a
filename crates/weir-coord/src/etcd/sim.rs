//! An etcd of the simulated world, for the simulator and for tests: the part of its JSON gateway that
//! coordinators use, with faults of its network.
use super::gateway::{Answer, Failure, Transport};
use super::value::{Body, Stored};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{BoxFuture, Env, Instant};
use weir_proto::Error;

/// What happens between a coordinator and etcd.
#[derive(Clone, Copy, Default, Debug)]
pub struct Weather {
    /// No request arrives.
    pub cut: bool,
    /// Of 100 requests, this many are carried out without an answer.
    pub lost_answers: u64,
    /// Requests, and answers, take up to this long.
    pub delay_ms: u64,
}

#[derive(Default)]
struct State {
    revision: u64,
    keys: BTreeMap<String, Kept>,
    leases: BTreeMap<u64, (Duration, Instant)>,
    last_lease: u64,
}

#[derive(Clone)]
struct Kept {
    value: String,
    made: u64,
    changed: u64,
    lease: u64,
}

/// Linearizable, and always there; requests to it and answers may be lost or late. Cheap to clone.
#[derive(Clone, Default)]
pub struct SimEtcd(Arc<Mutex<State>>);

/// The way of one coordinator to it.
pub struct Way {
    pub env: Env,
    /// Of etcd's own machine: a request that has arrived there is carried out, also if the coordinator dies.
    pub etcd_env: Env,
    pub etcd: SimEtcd,
    pub weather: Arc<Mutex<Weather>>,
}

impl Transport for Way {
    fn post<'a>(
        &'a self,
        _endpoint: &'a str,
        path: &'static str,
        body: Arc<str>,
        patience: Duration,
    ) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let weather = *self.weather.lock().unwrap_or_else(PoisonError::into_inner);
            let silent = || Failure::Silent("no answer".into());
            let pause = || Duration::from_millis(self.env.rng.below(weather.delay_ms + 1));
            if weather.cut {
                self.env.clock.sleep(patience).await;
                return Err(silent());
            }
            let (report, reported) = tokio::sync::oneshot::channel();
            let (env, etcd, there, back) = (self.etcd_env.clone(), self.etcd.clone(), pause(), pause());
            let lost = self.env.rng.below(100) < weather.lost_answers;
            self.etcd_env.tasks.spawn("a request to etcd", async move {
                env.clock.sleep(there).await;
                let answer = etcd.carry_out(path, &body, env.clock.now());
                env.clock.sleep(back).await;
                if !lost {
                    let _ = report.send(answer);
                }
            });
            match self.env.clock.timeout(patience, reported).await {
                Ok(Ok(answer)) => answer,
                _ => Err(silent()),
            }
        })
    }
}

impl SimEtcd {
    /// The value of a key; none if it is in parts.
    pub fn value(&self, key: &str) -> Option<String> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = BASE64.decode(&state.keys.get(key)?.value).ok()?;
        match Stored::decode(&bytes).ok()?.body {
            Body::Whole(value) => Some(String::from_utf8_lossy(&value).into_owned()),
            Body::InParts { .. } => None,
        }
    }

    fn state(&self, now: Instant) -> MutexGuard<'_, State> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ended: Vec<u64> =
            state.leases.iter().filter(|(_, (_, ends))| *ends <= now).map(|(id, _)| *id).collect();
        ended.into_iter().for_each(|id| state.end(id));
        state
    }

    fn carry_out(&self, path: &str, body: &str, now: Instant) -> Answer {
        let request: Value = serde_json::from_str(body).expect("the store writes JSON");
        let mut state = self.state(now);
        let id = number(&request, "ID");
        match path {
            "/v3/kv/range" => Ok(state.range(&request)),
            "/v3/kv/txn" => state.transact(&request),
            "/v3/lease/grant" => {
                let ttl = Duration::from_secs(number(&request, "TTL"));
                state.last_lease += 1;
                let id = state.last_lease;
                state.leases.insert(id, (ttl, now + ttl));
                Ok(json!({ "ID": id.to_string(), "TTL": ttl.as_secs().to_string() }))
            }
            "/v3/lease/keepalive" => Ok(match state.leases.get_mut(&id) {
                Some((ttl, ends)) => {
                    *ends = now + *ttl;
                    json!({ "result": { "ID": id.to_string(), "TTL": ttl.as_secs().to_string() } })
                }
                None => json!({ "result": { "ID": id.to_string() } }),
            }),
            "/v3/lease/revoke" => {
                state.end(id);
                Ok(json!({}))
            }
            _ => panic!("etcd has no {path}"),
        }
    }
}

impl State {
    fn end(&mut self, lease: u64) {
        self.leases.remove(&lease);
        let before = self.keys.len();
        self.keys.retain(|_, kept| kept.lease != lease);
        self.revision += u64::from(self.keys.len() < before);
    }

    fn range(&self, request: &Value) -> Value {
        let key = key_of(request, "key");
        let Some(kept) = self.keys.get(&key) else { return json!({}) };
        json!({ "kvs": [{
            "key": BASE64.encode(key), "value": kept.value, "create_revision": kept.made.to_string(),
            "mod_revision": kept.changed.to_string(),
        }] })
    }

    fn transact(&mut self, request: &Value) -> Answer {
        let holds = |condition: &Value| {
            let kept = self.keys.get(&key_of(condition, "key"));
            match condition["target"].as_str() {
                Some("MOD") => kept.map_or(0, |k| k.changed) == number(condition, "mod_revision"),
                Some("CREATE") => kept.map_or(0, |k| k.made) == number(condition, "create_revision"),
                _ => panic!("an unknown comparison: {condition}"),
            }
        };
        let succeeded = request["compare"].as_array().unwrap().iter().all(holds);
        let steps = request[if succeeded { "success" } else { "failure" }].as_array().unwrap().clone();
        let lease = |step: &Value| step.get("request_put").map_or(0, |put| number(put, "lease"));
        if steps.iter().map(lease).any(|lease| lease != 0 && !self.leases.contains_key(&lease)) {
            return Err(Failure::Refused(Error::not_found("etcdserver: requested lease not found")));
        }
        self.revision += u64::from(succeeded);
        let responses: Vec<Value> = steps.iter().map(|step| self.step(step)).collect();
        Ok(json!({
            "header": { "revision": self.revision.to_string() }, "succeeded": succeeded, "responses": responses,
        }))
    }

    fn step(&mut self, step: &Value) -> Value {
        if let Some(put) = step.get("request_put") {
            let (key, lease, now) = (key_of(put, "key"), number(put, "lease"), self.revision);
            let made = self.keys.get(&key).map_or(now, |kept| kept.made);
            let value = put["value"].as_str().unwrap().to_owned();
            self.keys.insert(key, Kept { value, made, changed: now, lease });
        } else if let Some(delete) = step.get("request_delete_range") {
            let (from, to) = (key_of(delete, "key"), key_of(delete, "range_end"));
            self.keys.retain(|key, _| *key < from || *key >= to);
        } else if let Some(range) = step.get("request_range") {
            return json!({ "response_range": self.range(range) });
        }
        json!({})
    }
}

fn key_of(value: &Value, field: &str) -> String {
    String::from_utf8(BASE64.decode(value[field].as_str().unwrap()).unwrap()).unwrap()
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_str().map_or(0, |text| text.parse().unwrap())
}
