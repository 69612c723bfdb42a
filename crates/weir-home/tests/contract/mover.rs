//! A mover with thousands of small files and a home that hangs: it holds a limited number of them, and ships
//! all when home answers.
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use weir_client::{Client, NewRelation, OpenMode};
use weir_env::BoxFuture;
use weir_home::mover::{HomeOf, Mover, OpenHome};
use weir_home::{Home, HomePath, IdMap, LaneLimits, Outcome, WeirHome, WeirHomeConfig};
use weir_lab::{Lab, new_volume, quota, root};
use weir_proto::InodeId;
use weir_proto::relation::RelationState;

const URL: &str = "weir://lab:7000/homes";
const FILES: usize = 4000;

/// A home that does not open before it is allowed to.
struct Hanging {
    home: Arc<dyn Home>,
    opens: Semaphore,
}

impl OpenHome for Hanging {
    fn open(&self, _: &HomeOf) -> BoxFuture<'_, Outcome<Arc<dyn Home>>> {
        Box::pin(async {
            let opened = self.opens.acquire().await;
            drop(opened.expect("it is never closed"));
            Ok(self.home.clone())
        })
    }
}

async fn open_home(lab: &Lab, client: &Client) -> Arc<dyn Home> {
    client.mkdir(&root(), InodeId::ROOT, b"homes", 0o755).await.unwrap();
    let config = WeirHomeConfig {
        url: URL.into(),
        client: lab.client("home").await,
        base: HomePath::parse("homes").unwrap(),
        relation: "test".into(),
        is_new: true,
        only_reads: false,
        ids: IdMap::default(),
        limits: LaneLimits::default(),
    };
    Arc::new(WeirHome::open(&lab.env("home"), config).await.unwrap())
}

#[test]
fn a_mover_holds_a_limited_number_of_files_of_a_home_that_hangs() {
    Lab::new(910).run(6, |lab| async move {
        let client = lab.client("a").await;
        let home = open_home(&lab, &client).await;
        let volume = client.create_volume(&root(), &new_volume("data", quota(0, 0))).await.unwrap();
        for n in 0..FILES {
            let name = format!("f{n}").into_bytes();
            let made = client.create(&root(), volume.root, &name, 0o644, true, OpenMode::BOTH).await.unwrap();
            client.release(made.handle).await.unwrap();
        }
        let new = NewRelation { url: URL.into(), ..NewRelation::default() };
        client.add_relation(&root(), volume.id, &new).await.unwrap();
        let opener = Arc::new(Hanging { home, opens: Semaphore::new(0) });
        let (mover, of) = (Mover::new(lab.env("mover"), opener.clone()), lab.client("mover").await);
        lab.env("mover").tasks.spawn("mover", async move {
            loop {
                mover.run(&of).await;
            }
        });
        let watch = lab.env("mover").watch;
        let items = || watch.meters.total("weir_mover_items").map_or(0, |(_, count)| count as usize);
        let mut most = 0;
        for _ in 0..1000 {
            lab.world().sleep(Duration::from_millis(20)).await;
            most = most.max(items());
        }
        assert!((1024..=2048).contains(&most), "{most} of {FILES} files are with the mover");
        opener.opens.add_permits(1);
        let begun = lab.world().now();
        loop {
            lab.world().sleep(Duration::from_millis(500)).await;
            assert!(items() <= 2048, "{} items", items());
            let relation = client.relations(Some(volume.id)).await.unwrap().remove(0);
            if relation.state == (RelationState::Synced {}) {
                break;
            }
            let waited = lab.world().now().since(begun);
            assert!(waited < Duration::from_secs(900), "after {waited:?}: {relation:?}");
        }
        assert_eq!(items(), 0, "nothing is left over");
    });
}
