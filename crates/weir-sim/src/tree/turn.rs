//! One step on the shared tree: a change or an inspection, and its comparison with the model.
use super::{
    Change, DIRECTORY_MODE, DIRS_MAX, FILE_BYTES_MAX, FILE_MODE, FILES_MAX, Held, MARK, NAMES, Place, State,
    Tree, Unsynced, read_tree,
};
use crate::calls::{close, read_all, read_whole, root_cred};
use crate::client_states::LEAVES;
use crate::context::Context;
use crate::model::{Who, bytes_of};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;
use weir_client::{Client, OpenMode, SetAttrs};
use weir_env::Rng;
use weir_proto::meta::{Attr, FileKind, RenameMode};
use weir_proto::{Error, ErrorKind, InodeId};

/// One operation.
pub(super) struct TreeTurn<'w> {
    pub(super) context: &'w Context,
    pub(super) client: &'w Client,
    pub(super) me: Who,
    pub(super) rng: &'w Rng,
    pub(super) op: u64,
}

impl TreeTurn<'_> {
    /// Finds out whether a change in doubt is done, and which changes were lost with their author.
    pub(super) async fn settle(&self, state: &mut State) -> Result<(), Error> {
        let states = &self.context.client_states;
        let author = state.unsynced.as_ref().map(|unsynced| unsynced.who);
        let is_lost = author.is_some_and(|who| states.who(who.client) != who);
        if let Some((_, who, since)) = &state.pending {
            // Requests in flight may still take effect.
            while states.is_leaving(*who) || self.context.world.now() < *since + LEAVES {
                self.context.world.sleep(Duration::from_millis(200)).await;
            }
        } else if !is_lost && author.is_none_or(|who| who == self.me) {
            return Ok(());
        }
        while author.is_some_and(|who| is_lost && states.is_leaving(who)) {
            self.context.world.sleep(Duration::from_millis(200)).await;
        }
        let (seen, _) = read_tree(self.client, state.tree.root).await?;
        let mut after = None;
        if let Some((change, ..)) = &state.pending {
            let made = match change {
                Change::MakeDirectory(place) | Change::MakeFile(place) => seen.at(place),
                _ => None,
            };
            after = state.tree.after(change, made.unwrap_or(InodeId(0)));
            self.log(format_args!("{change:?} is done: {}", Some(&seen) == after.as_ref()));
        }
        let before = state.unsynced.iter().filter(|_| is_lost).flat_map(|unsynced| &unsynced.before);
        let lost = before.clone().any(|tree| *tree == seen);
        assert!(
            seen == state.tree || Some(&seen) == after.as_ref() || lost,
            "operation {}: it is half done: {seen:?}, before {:?}",
            self.op,
            state.tree
        );
        if lost && seen != state.tree {
            self.log("changes were lost with their author");
        }
        // All that this client has seen is durable, except for its own changes.
        if author != Some(self.me) {
            state.unsynced = None;
        }
        self.leaves(state, seen);
        Ok(())
    }
    fn leaves(&self, state: &mut State, tree: Tree) {
        state.contents.retain(|ino, _| tree.nodes.contains_key(ino));
        (state.tree, state.pending) = (tree, None);
    }

    fn log(&self, what: impl Display) {
        self.context.log(self.op, format_args!("c{} tree: {what}", self.me.client));
    }

    pub(super) async fn inspect(&self, state: &mut State) -> Result<(), Error> {
        self.log("inspect");
        self.compare(state, &format!("operation {}", self.op)).await?;
        match (self.rng.below(3), self.some(&state.contents.keys().copied().collect::<Vec<_>>())) {
            (0, Some(ino)) => self.read(state, *ino).await,
            (1, Some(ino)) => self.hold(state, *ino).await,
            _ => self.let_go(state).await,
        }
    }
    async fn hold(&self, state: &mut State, ino: InodeId) -> Result<(), Error> {
        let handle = self.client.open(&root_cred(), ino, OpenMode::READ).await?.handle;
        state.held.push(Held { who: self.me, handle, ino, bytes: state.contents[&ino] });
        Ok(())
    }
    /// Closes one of this client's open files, if it was not cut off since.
    async fn let_go(&self, state: &mut State) -> Result<(), Error> {
        state.held.retain(|held| held.who.client != self.me.client || held.who == self.me);
        let Some(mine) = state.held.iter().position(|held| held.who == self.me) else { return Ok(()) };
        let Held { handle, ino, bytes: (op, len), .. } = state.held.remove(mine);
        let got = read_all(self.client, handle, 0, len + 1).await?;
        let is_right = got == bytes_of(op, 0, len);
        assert!(is_right, "operation {}: {ino} of the tree, open: {} bytes", self.op, got.len());
        close(self.client, handle).await
    }
    pub(super) async fn compare(&self, state: &State, what: &str) -> Result<BTreeMap<InodeId, Attr>, Error> {
        let (seen, attrs) = read_tree(self.client, state.tree.root).await?;
        assert_eq!(seen, state.tree, "{what}: c{} sees another tree", self.me.client);
        for (ino, attr) in attrs.iter().filter(|(_, attr)| attr.kind != FileKind::Directory) {
            assert_eq!(attr.nlink as usize, state.tree.links(*ino), "{what}: links of {ino}");
            if let Some((_, len)) = state.contents.get(ino) {
                assert_eq!(attr.size, *len as u64, "{what}: size of {ino}");
            }
        }
        Ok(attrs)
    }
    pub(super) async fn read(&self, state: &State, ino: InodeId) -> Result<(), Error> {
        let (op, len) = state.contents[&ino];
        let got = read_whole(self.client, ino).await?;
        assert!(got == bytes_of(op, 0, len), "operation {}: {ino} of the tree: {} bytes", self.op, got.len());
        Ok(())
    }

    pub(super) async fn change(&self, state: &mut State) -> Result<(), Error> {
        let change = self.choose(&state.tree);
        self.log(format_args!("{change:?}"));
        state.pending = Some((change.clone(), self.me, self.context.world.now()));
        let made = match self.carry_out(&change).await {
            Ok(made) => made,
            Err(e)
                if matches!(
                    e.kind,
                    ErrorKind::NotFound | ErrorKind::Exists | ErrorKind::Invalid | ErrorKind::Name(_)
                ) && state.tree.after(&change, InodeId(0)).is_none() =>
            {
                state.pending = None; // as expected
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let after = state.tree.after(&change, made);
        let after = after
            .unwrap_or_else(|| panic!("operation {}: {change:?} was not refused: {:?}", self.op, state.tree));
        let before = std::mem::replace(&mut state.tree, after.clone());
        self.leaves(state, after);
        match self.rng.below(3) {
            0 => {
                self.client.sync_names(state.tree.root).await?;
                state.unsynced = None;
            }
            _ => {
                let unsynced = state.unsynced.get_or_insert(Unsynced { who: self.me, before: Vec::new() });
                assert_eq!(unsynced.who, self.me, "another author's changes are settled first");
                unsynced.before.push(before);
            }
        }
        if let Change::MakeFile(_) = change {
            // Its create was synced, and with it all before.
            state.unsynced = None;
            let len = self.rng.below(self.rng.below(FILE_BYTES_MAX) + 1) as usize;
            let handle = self.client.open(&root_cred(), made, OpenMode::WRITE).await?.handle;
            let wrote = self.client.write(handle, 0, bytes_of(self.op, 0, len).into()).await;
            let synced = self.client.fsync(handle).await;
            close(self.client, handle).await?;
            wrote.and(synced.map(|()| 0))?;
            state.contents.insert(made, (self.op, len));
        }
        Ok(())
    }

    /// Returns the inode that was made, if any.
    async fn carry_out(&self, change: &Change) -> Result<InodeId, Error> {
        let (client, cred) = (self.client, &root_cred());
        let none = InodeId(0);
        match change {
            Change::MakeDirectory(Place { dir, name }) => {
                Ok(client.mkdir(cred, *dir, name.as_bytes(), DIRECTORY_MODE).await?.attr.ino)
            }
            Change::MakeFile(Place { dir, name }) => {
                let made =
                    client.create(cred, *dir, name.as_bytes(), FILE_MODE, true, OpenMode::WRITE).await?;
                close(client, made.handle).await?;
                client.sync_names(*dir).await?;
                Ok(made.stat.attr.ino)
            }
            Change::Link { ino, place } => {
                client.link(cred, *ino, place.dir, place.name.as_bytes()).await.map(|_| none)
            }
            Change::Remove { place, is_directory: true } => {
                client.rmdir(cred, place.dir, place.name.as_bytes()).await.map(|()| none)
            }
            Change::Remove { place, is_directory: false } => {
                client.unlink(cred, place.dir, place.name.as_bytes()).await.map(|()| none)
            }
            Change::Rename { from, to, mode } => {
                let (name, new_name) = (from.name.as_bytes(), to.name.as_bytes());
                client.rename(cred, from.dir, name, to.dir, new_name, *mode).await.map(|()| none)
            }
            Change::Mode { ino, mode } => {
                let set = SetAttrs { mode: Some(*mode), ..SetAttrs::default() };
                client.setattr(cred, *ino, None, set).await.map(|_| none)
            }
            Change::Mark { ino, mark } => {
                client.set_xattr(cred, *ino, MARK, mark, false, false).await.map(|()| none)
            }
        }
    }

    fn some<'a, T>(&self, list: &'a [T]) -> Option<&'a T> {
        list.get(self.rng.below(list.len().max(1) as u64) as usize)
    }
    fn some_place(&self, dirs: &[InodeId]) -> Place {
        let dir = *self.some(dirs).expect("the topmost directory");
        Place { dir, name: format!("n{}", self.rng.below(NAMES)) }
    }
    /// Mostly a valid change.
    fn choose(&self, tree: &Tree) -> Change {
        let (dirs, files): (Vec<InodeId>, Vec<InodeId>) =
            tree.nodes.keys().partition(|ino| tree.is_directory(**ino));
        let all: Vec<InodeId> = tree.nodes.keys().copied().filter(|ino| *ino != tree.root).collect();
        let mut named = Vec::new();
        for dir in &dirs {
            let names = tree.entries(*dir).into_iter().flatten();
            named.extend(names.map(|(name, _)| Place { dir: *dir, name: name.clone() }));
        }
        let place = self.some_place(&dirs);
        let old = self.some(&named).cloned().unwrap_or_else(|| place.clone());
        let ino = self.some(&all).copied();
        let file = self.some(&files).copied();
        match (self.rng.below(20), ino, file) {
            (0..3, ..) if dirs.len() < DIRS_MAX => Change::MakeDirectory(place),
            (3..7, ..) if files.len() < FILES_MAX => Change::MakeFile(place),
            (7..9, _, Some(ino)) => Change::Link { ino, place },
            (9, Some(ino), _) => Change::Mode { ino, mode: 0o700 + self.rng.below(64) as u32 },
            (10, Some(ino), _) => Change::Mark { ino, mark: Bytes::from(format!("{}", self.op)) },
            (11..14, ..) => {
                let is_directory = tree.at(&old).is_some_and(|ino| tree.is_directory(ino));
                Change::Remove { place: old, is_directory }
            }
            (14..16, ..) => {
                let to = self.some(&named).cloned().unwrap_or(place);
                Change::Rename { from: old, to, mode: RenameMode::Exchange }
            }
            (16, ..) => Change::Rename { from: old, to: place, mode: RenameMode::NoReplace },
            _ => Change::Rename { from: old, to: place, mode: RenameMode::Replace },
        }
    }
}
