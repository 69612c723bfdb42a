//! Operations on the names of a turn file: rename, exchange, replace, unlink, restore from the trash.
use super::{Answer, Doing, Turn};
use crate::calls::{close, read_all, root_cred};
use crate::trash::Trash;
use crate::turn_file::{Slot, TurnFile};
use std::collections::btree_map::Entry;
use weir_proto::InodeId;
use weir_proto::meta::RenameMode;

impl Turn<'_> {
    pub(super) async fn rename(&self, file: &mut TurnFile, other: Option<&mut Slot>) -> Answer<()> {
        if let Some(other) = other {
            self.work.abandon_if_moving(other);
            match (&mut other.file, self.rng.below(3)) {
                (Some(there), 0) => return self.exchange(file, there).await,
                (there @ Some(_), 1) => return self.replace(file, there.take().expect("just seen")).await,
                _ => {}
            }
        }
        self.rename_to(file, self.new_name(), RenameMode::Replace).await
    }

    pub(super) async fn rename_to(
        &self,
        file: &mut TurnFile,
        to: (usize, String),
        mode: RenameMode,
    ) -> Answer<()> {
        let (dir, name) = &to;
        self.log(file, format_args!("rename to {name} in d{dir} ({mode:?})"));
        let parents = (self.work.context.dirs[file.dir], self.work.context.dirs[*dir]);
        file.moving = true;
        let from = (file.dir, file.name.clone());
        self.work.context.found().uncertain.extend([from.clone(), to.clone()]);
        self.client
            .rename(&root_cred(), parents.0, from.1.as_bytes(), parents.1, name.as_bytes(), mode)
            .await
            .doing("rename")?;
        self.sync(&[parents.0, parents.1]).await?;
        file.moving = false;
        self.work.context.found().uncertain.retain(|known| *known != from && *known != to);
        (file.dir, file.name) = to;
        Ok(())
    }

    /// From here on the change survives its client, too. The shared tree tests those that are not synced.
    async fn sync(&self, dirs: &[InodeId]) -> Answer<()> {
        for dir in dirs {
            self.client.sync_names(*dir).await.doing("sync a directory")?;
        }
        Ok(())
    }

    pub(super) async fn replace(&self, file: &mut TurnFile, there: TurnFile) -> Answer<()> {
        self.rename_to(file, (there.dir, there.name.clone()), RenameMode::Replace).await?;
        self.leave_nameless(there).await
    }

    async fn exchange(&self, file: &mut TurnFile, other: &mut TurnFile) -> Answer<()> {
        let before = (file.dir, file.name.clone());
        other.moving = true;
        self.rename_to(file, (other.dir, other.name.clone()), RenameMode::Exchange).await?;
        (other.dir, other.name) = before;
        other.moving = false;
        Ok(())
    }

    /// Removes the name; clients that have it open can still read it. At times it is restored from the trash.
    pub(super) async fn unlink(&self, mut file: TurnFile) -> Answer<Option<TurnFile>> {
        self.log(&file, "unlink");
        self.work.context.found().uncertain.insert((file.dir, file.name.clone()));
        let parent = self.work.context.dirs[file.dir];
        self.client.unlink(&root_cred(), parent, file.name.as_bytes()).await.doing("unlink")?;
        self.sync(&[parent]).await?;
        self.work.context.found().uncertain.remove(&(file.dir, file.name.clone()));
        let gone = self
            .client
            .lookup(&root_cred(), parent, file.name.as_bytes())
            .await
            .doing("lookup after unlink")?;
        assert!(gone.is_none(), "operation {}: {} is still there after its unlink", self.op, file.name);
        self.read_removed(&mut file).await?;
        if let Some(trash) = &self.work.trash {
            if self.rng.below(2) == 0 {
                return self.put_back(trash, file).await;
            }
            trash.threw(&file.name, file.ino, file.model.clone());
        }
        self.work.context.found().nameless.push(file);
        Ok(None)
    }

    /// None: it is purged already.
    async fn put_back(&self, trash: &Trash, mut file: TurnFile) -> Answer<Option<TurnFile>> {
        let found = trash.find(self.client, file.ino).await.doing("find in the trash")?;
        let Some((from, old)) = found else {
            self.work.context.found().nameless.push(file);
            return Ok(None);
        };
        let (dir, name) = self.new_name();
        self.log(&file, format_args!("put back as {name} in d{dir}"));
        self.work.context.found().uncertain.insert((dir, name.clone()));
        let (to, mode) = (self.work.context.dirs[dir], RenameMode::NoReplace);
        let put = self.client.rename(&root_cred(), from, old.as_bytes(), to, name.as_bytes(), mode).await;
        match put {
            Err(e) if trash.may_lose(&e) => {
                self.work.context.found().nameless.push(file);
                return Ok(None);
            }
            put => put.doing("put back")?,
        }
        self.sync(&[to]).await?;
        self.work.context.found().uncertain.remove(&(dir, name.clone()));
        (file.dir, file.name) = (dir, name);
        Ok(Some(file))
    }

    /// The file has lost its name. Other clients that have it open keep it.
    pub(super) async fn leave_nameless(&self, mut file: TurnFile) -> Answer<()> {
        let read = self.read_removed(&mut file).await;
        self.work.context.found().nameless.push(file);
        read
    }

    /// A client that has a file without a name open can still read it, if it was not cut off since.
    async fn read_removed(&self, file: &mut TurnFile) -> Answer<()> {
        let Entry::Occupied(open) = file.handles.entry(self.me.client) else { return Ok(()) };
        if open.get().1 != self.me {
            return Ok(());
        }
        let (handle, _) = open.remove();
        let got = read_all(self.client, handle, 0, usize::MAX).await.doing("read an unlinked file")?;
        if !self.doubts_self(file) {
            file.model
                .check(0, got.len() + 1, &got)
                .unwrap_or_else(|e| panic!("operation {}: unlinked {}: {e}", self.op, file.name));
        }
        close(self.client, handle).await.doing("close an unlinked file")
    }
}
