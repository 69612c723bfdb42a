//! Backups as the metadata leader knows them: their places, and the client that makes one now. Each call asks
//! the leader; nothing is cached.
use super::Client;
use crate::leader::Change;
use weir_env::BoxFuture;
use weir_proto::backup::{
    Backup, BackupDone, BackupList, BackupOutcome, BackupRetention, BackupSet, BackupTake, Backups,
};
use weir_proto::meta::Cred;
use weir_proto::{Result, VolumeId};

/// Changes to a backup place; absent fields keep their value.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackupEdit {
    /// 0: no longer at an interval.
    pub every_s: Option<u32>,
    pub keep: Option<BackupRetention>,
    pub forget: bool,
}

impl Client {
    /// The backups of one volume or of all.
    pub fn backups(&self, volume: Option<VolumeId>) -> BoxFuture<'_, Result<Vec<Backup>>> {
        Box::pin(async move {
            let ask = |session| BackupList { session, volume };
            let Backups { backups } = self.parts.base.leader.ask(ask).await?;
            Ok(backups)
        })
    }
    /// Registers a place for backups of a volume, or changes it.
    pub fn set_backup<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        url: &'a str,
        edit: BackupEdit,
    ) -> BoxFuture<'a, Result<Backup>> {
        Box::pin(async move {
            let BackupEdit { every_s, keep, forget } = edit;
            let (cred, url) = (cred.clone(), url.to_owned());
            let make =
                |op| BackupSet { op, cred: cred.clone(), volume, url: url.clone(), every_s, keep, forget };
            self.parts.base.leader.change(Change::once(), make).await
        })
    }
    /// Claims a backup to make: until `backup_done`, or the end of this client's session.
    pub fn take_backup<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        url: &'a str,
    ) -> BoxFuture<'a, Result<Option<Backup>>> {
        Box::pin(async move {
            let make = |op| BackupTake { op, cred: cred.clone(), volume, url: url.to_owned() };
            Ok(self.parts.base.leader.change(Change::once(), make).await?.backup)
        })
    }
    pub fn backup_done<'a>(
        &'a self,
        volume: VolumeId,
        url: &'a str,
        outcome: &'a BackupOutcome,
    ) -> BoxFuture<'a, Result<Backup>> {
        Box::pin(async move {
            let make = |op| BackupDone { op, volume, url: url.to_owned(), outcome: outcome.clone() };
            self.parts.base.leader.change(Change::once(), make).await
        })
    }
}
