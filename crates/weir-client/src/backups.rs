//! Backups as the metadata leader knows them: where they go, who makes one now. Asked each time, nothing is
//! kept.
use crate::Client;
use weir_env::BoxFuture;
use weir_proto::backup::{
    Backup, BackupDone, BackupList, BackupOutcome, BackupRetention, BackupSet, BackupTake, Backups,
};
use weir_proto::meta::Cred;
use weir_proto::{Result, VolumeId};

/// What is to be changed of a place; the rest stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackupEdit {
    /// 0: not by itself any more.
    pub every_s: Option<u32>,
    pub keep: Option<BackupRetention>,
    pub forget: bool,
}

impl Client {
    /// Of one volume or of all.
    pub fn backups(&self, volume: Option<VolumeId>) -> BoxFuture<'_, Result<Vec<Backup>>> {
        Box::pin(async move {
            let ask = |session| BackupList { session, volume };
            let Backups { backups } = self.inner.session.ask(self.inner.deadline(), ask).await?;
            Ok(backups)
        })
    }
    /// Makes a place known where backups of a volume go, or changes it.
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
            self.inner.session.change(self.inner.deadline(), make).await
        })
    }
    /// Takes the making of a backup: until `backup_done`, or the end of this client's session.
    pub fn take_backup<'a>(
        &'a self,
        cred: &'a Cred,
        volume: VolumeId,
        url: &'a str,
    ) -> BoxFuture<'a, Result<Option<Backup>>> {
        Box::pin(async move {
            let make = |op| BackupTake { op, cred: cred.clone(), volume, url: url.to_owned() };
            Ok(self.inner.session.change(self.inner.deadline(), make).await?.backup)
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
            self.inner.session.change(self.inner.deadline(), make).await
        })
    }
}
