//! The changes that an answer waits for, while the disk of the metadata is silent.
use crate::common::*;
use std::time::Duration;
use weir_env::sim::{DiskFaults, World};
use weir_proto::meta::*;
use weir_proto::{InodeId, Result};

/// Longer than any answer takes that waits for no disk.
const LONG: Duration = Duration::from_secs(1);

fn set_silent(world: &World, hangs: bool) {
    world.set_disk_faults("meta", DiskFaults { hangs, ..DiskFaults::default() });
}

async fn list(client: &Client, dir: InodeId) -> Result<Listing> {
    let session = client.session;
    client.call(&ReadDir { session, cred: root(), dir, after: 0, limit: 100, with_attrs: false }).await
}

#[test]
fn a_read_waits_for_no_change_but_those_that_it_shows() {
    simulate(11, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        let made = async |name| a.mkdir(ROOT, name).await.unwrap().entry.attr.ino;
        let (here, there) = (made("here").await, made("there").await);
        for n in ["1", "2", "3"] {
            b.mkdir(there, n).await.unwrap();
        }
        set_silent(&world, true);
        let clock = &b.env.clock;
        let change = async {
            a.mkdir(here, "new").await.unwrap();
            clock.now()
        };
        let reads = async {
            world.sleep(LONG).await;
            // Neither a listing nor attributes of another directory wait.
            let begun = clock.now();
            assert_eq!(list(&b, there).await.unwrap().entries.len(), 3);
            b.getattr(there).await.unwrap();
            assert!(b.lookup(there, "1").await.unwrap().entry.is_some());
            assert!(clock.now().since(begun) < LONG, "they waited for the disk");
            // Answers that show the new name do, by its name or in a listing.
            let (named, listed) = tokio::join!(b.lookup(here, "new"), list(&b, here));
            assert!(named.unwrap().entry.is_some() && listed.unwrap().entries.len() == 1);
            clock.now()
        };
        let disk = async {
            world.sleep(3 * LONG).await;
            set_silent(&world, false);
            clock.now()
        };
        let (durable, shown, answers) = tokio::join!(change, reads, disk);
        assert!(durable >= answers, "a change was answered before it was durable");
        assert!(shown >= answers, "a name was shown that a crash takes back");
    });
}
