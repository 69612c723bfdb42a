//! A small service to call, and a hand-held peer that speaks raw bytes.
#![allow(dead_code)] // each test file uses its part

use bytes::Bytes;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use weir_env::{Addr, BoxStream, Env};
use weir_proto::frame::{FrameKind, HEADER_BYTES, Header, Hello};
use weir_proto::map::Role;
use weir_proto::methods::Method;
use weir_proto::version::{LEVEL_MAX, VERSION_MIN};
use weir_proto::{Error, Request, Wire, message};
use weir_rpc::{Call, Connection, Handled, Identity, Policy, Reply, Server, Service, Trust, serve};
use weir_trust::certificate::{Authority, Grant};
use weir_trust::handshake::Tls;

/// Longer than any stall of a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

message!(
    /// Answered in place with the same words and payload.
    Echo = 9001 by [Storage, Console] -> Echoed { words: String }
);
message!(Echoed { words: String });
message!(
    /// Answered on the test's request: see `Bench::release`.
    Wait = 9002 by [Storage, Console] -> Echoed {}
);
message!(
    /// Answered by what a call back to the caller answers.
    CallMeBack = 9003 by [Storage, Console] -> Echoed { words: String }
);
message!(
    /// Always refused.
    Refuse = 9004 by [Storage, Console] -> () { why: String }
);
message!(
    /// Answered by the number of requests of this kind before.
    Count = 9005 by [Storage, Console] -> Counted {}
);
message!(Counted { before: u64 });
message!(Panic = 9006 by [Storage] -> () {});
message!(
    /// Answered with this many bytes.
    Produce = 9007 by [Storage, Console] -> () { bytes: u32 }
);
message!(
    /// Answered when it is too late, with the reason.
    TooLate = 9008 by [Storage, Console] -> () { why: String }
);

message!(
    /// Counted as `Count` is.
    ForMovers = 9009 by [Mover] -> Counted {}
);

message!(
    /// Answered on the test's request, if its caller still waits then.
    WhileWanted = 9010 by [Storage] -> Echoed {}
);

pub struct Bench {
    pub env: Env,
    pub counted: AtomicU64,
    /// A permit for each wait that may end.
    pub release: tokio::sync::Semaphore,
    /// Waits that ran to their end.
    pub waits_ended: AtomicUsize,
    pub gone: Mutex<Vec<u64>>,
    /// Why work was not begun: its caller no longer waited.
    pub dropped: Mutex<Vec<String>>,
}

impl Bench {
    pub fn new(env: &Env) -> Arc<Bench> {
        Arc::new(Bench {
            env: env.clone(),
            counted: AtomicU64::new(0),
            release: tokio::sync::Semaphore::new(0),
            waits_ended: AtomicUsize::new(0),
            gone: Mutex::default(),
            dropped: Mutex::default(),
        })
    }
}

/// The service of the tests, shared with them.
pub struct Shared(pub Arc<Bench>);

/// In the order of their numbers, from 9001 on.
static METHODS: [Method; 10] = [
    Method::of::<Echo>(),
    Method::of::<Wait>(),
    Method::of::<CallMeBack>(),
    Method::of::<Refuse>(),
    Method::of::<Count>(),
    Method::of::<Panic>(),
    Method::of::<Produce>(),
    Method::of::<TooLate>(),
    Method::of::<ForMovers>(),
    Method::of::<WhileWanted>(),
];

impl Service for Shared {
    fn method(&self, number: u16) -> Option<&'static Method> {
        METHODS.iter().find(|method| method.number == number)
    }
    fn handle(&self, call: Call) -> Handled {
        match call.method {
            Echo::METHOD => Handled::Now(call.decode::<Echo>().map(|echo| {
                let payload = if call.payload.is_empty() { vec![] } else { vec![call.payload] };
                Reply::with_payload(&Echoed { words: echo.words }, payload)
            })),
            Refuse::METHOD => Handled::Now(call.decode::<Refuse>().and_then(|r| Err(Error::denied(r.why)))),
            Count::METHOD | ForMovers::METHOD => {
                Handled::Now(Ok(Reply::new(&Counted { before: self.0.counted.fetch_add(1, SeqCst) })))
            }
            Wait::METHOD => {
                let bench = self.0.clone();
                Handled::Later(Box::pin(async move {
                    call.decode::<Wait>()?;
                    bench.release.acquire().await.expect("never closed").forget();
                    bench.waits_ended.fetch_add(1, SeqCst);
                    Ok(Reply::new(&Echoed { words: "waited".into() }))
                }))
            }
            WhileWanted::METHOD => {
                let bench = self.0.clone();
                Handled::Later(Box::pin(async move {
                    bench.release.acquire().await.expect("never closed").forget();
                    let wanted = call.demand.check(bench.env.clock.now());
                    if let Err(e) = &wanted {
                        bench.dropped.lock().unwrap().push(e.context.clone());
                    }
                    bench.waits_ended.fetch_add(1, SeqCst);
                    wanted.map(|()| Reply::new(&Echoed { words: "wanted".into() }))
                }))
            }
            CallMeBack::METHOD => Handled::Later(Box::pin(async move {
                let words = call.decode::<CallMeBack>()?.words;
                let (answer, payload) =
                    call.connection.call(&Echo { words }, vec![call.payload], PATIENCE).await?;
                Ok(Reply::with_payload(&answer, payload))
            })),
            TooLate::METHOD => {
                let clock = self.0.env.clock.clone();
                Handled::Later(Box::pin(async move {
                    clock.sleep_until(call.deadline).await;
                    Err(Error::deadline(call.decode::<TooLate>()?.why))
                }))
            }
            Panic::METHOD => Handled::Later(Box::pin(async move { panic!("as asked") })),
            Produce::METHOD => Handled::Now(
                call.decode::<Produce>()
                    .map(|p| Reply::with_payload(&(), Bytes::from(vec![7; p.bytes as usize]))),
            ),
            _ => Handled::Now(Err(call.unknown())),
        }
    }
    fn disconnected(&self, connection: &Connection) {
        self.0.gone.lock().unwrap().push(connection.id());
    }
}

pub fn identity(env: &Env, name: &str) -> Identity {
    identity_as(env, name, Role::Storage)
}

pub fn identity_as(env: &Env, name: &str, role: Role) -> Identity {
    let identity = Identity::new(env, name, role, None);
    match CLUSTER.try_with(|cluster| cluster.trust(name, role, 1)) {
        Ok(trust) => identity.trusting(Some(trust)),
        Err(_) => identity,
    }
}

tokio::task_local! {
    /// Where a test runs in it, its nodes have certificates of this cluster.
    pub static CLUSTER: Cluster;
}

/// A cluster whose nodes have certificates.
#[derive(Clone)]
pub struct Cluster {
    pub authority: Arc<Authority>,
    pub policy: Policy,
}

/// The clocks of its nodes, in seconds since 1970.
pub const NOW: u64 = 1_800_000_000;

impl Cluster {
    pub fn new(policy: Policy) -> Cluster {
        let authority = Authority::found(weir_proto::ClusterId([7; 16]), NOW).unwrap();
        Cluster { authority: Arc::new(authority), policy }
    }
    pub fn trust(&self, name: &str, role: Role, serial: u64) -> Arc<Trust> {
        let grant = Grant { name: name.replace(' ', "-"), roles: vec![role], serial };
        let credentials = self.authority.issue_own(&grant, NOW).unwrap();
        let tls = Tls::of_node(credentials, Arc::new(|| NOW));
        Arc::new(Trust::new(Arc::new(tls), self.policy.clone()))
    }
}

/// A server of the test service.
pub async fn server(env: &Env, addr: &Addr) -> (Server, Arc<Bench>, Addr) {
    let bench = Bench::new(env);
    let server =
        serve(env, std::slice::from_ref(addr), identity(env, "server"), Arc::new(Shared(bench.clone())))
            .await
            .unwrap();
    let bound = server.addrs()[0].clone();
    (server, bench, bound)
}

pub async fn client(env: &Env, addr: &Addr) -> Connection {
    weir_rpc::connect(env, addr, &identity(env, "client"), Arc::new(Shared(Bench::new(env)))).await.unwrap()
}

/// Waits for a condition, with a deadline.
pub async fn until(env: &Env, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = env.clock.now() + PATIENCE;
    while !condition() {
        assert!(env.clock.now() < deadline, "never happened: {what}");
        env.clock.sleep(Duration::from_millis(1)).await;
    }
}

/// A frame as bytes.
pub fn frame(header: Header, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = Header {
        body_len: body.len() as u32,
        payload_len: payload.len() as u32,
        payload_crc: weir_proto::checksum::crc32c(payload),
        ..header
    };
    [&header.encode(body)[..], body, payload].concat()
}

pub fn hello() -> Hello {
    Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MIN, // frames made by hand are of the first version
        level: LEVEL_MAX,
        cluster: None,
        name: "by hand".into(),
        role: Role::Console,
        instance: 1,
    }
}

/// A raw connection that is through its hello.
pub async fn raw(env: &Env, addr: &Addr) -> BoxStream {
    let mut stream = env.net.connect(addr).await.unwrap();
    stream.write_all(&frame(Header::new(FrameKind::Hello, 0), &hello().to_bytes(), &[])).await.unwrap();
    let (header, _) = read_frame(&mut stream).await.unwrap();
    assert_eq!(header.kind, FrameKind::HelloAck);
    stream
}

/// The next frame without payload, or `None` at the end of the stream.
pub async fn read_frame(stream: &mut BoxStream) -> Option<(Header, Vec<u8>)> {
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes).await.ok()?;
    let header = Header::decode(&bytes).unwrap();
    let mut body = vec![0; header.body_len as usize];
    stream.read_exact(&mut body).await.ok()?;
    weir_proto::frame::verify(&bytes, &body).unwrap();
    Some((header, body))
}

/// The peer's last message before it closed, if it sent any.
pub async fn last_words(env: &Env, stream: &mut BoxStream) -> Option<Error> {
    let words = async {
        let mut last = None;
        while let Some((header, body)) = read_frame(stream).await {
            if matches!(header.kind, FrameKind::Goodbye | FrameKind::ErrorResponse) {
                last = Some(Error::from_bytes(&body).unwrap());
            }
        }
        last
    };
    env.clock.timeout(PATIENCE, words).await.expect("the connection is closed")
}
