//! Backups as the metadata leader knows them: where they go, who makes one now. Asked each time, nothing is
//! kept.
use crate::Client;
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
    pub async fn backups(&self, volume: Option<VolumeId>) -> Result<Vec<Backup>> {
        let ask = |session| BackupList { session, volume };
        let Backups { backups } = self.inner.session.ask(self.inner.deadline(), ask).await?;
        Ok(backups)
    }
    /// Makes a place known where backups of a volume go, or changes it.
    pub async fn set_backup(
        &self,
        cred: &Cred,
        volume: VolumeId,
        url: &str,
        edit: BackupEdit,
    ) -> Result<Backup> {
        let BackupEdit { every_s, keep, forget } = edit;
        let (cred, url) = (cred.clone(), url.to_owned());
        let make = |op| BackupSet { op, cred: cred.clone(), volume, url: url.clone(), every_s, keep, forget };
        self.inner.session.change(self.inner.deadline(), make).await
    }
    /// Takes the making of a backup: until `backup_done`, or the end of this client's session.
    pub async fn take_backup(&self, cred: &Cred, volume: VolumeId, url: &str) -> Result<Option<Backup>> {
        let make = |op| BackupTake { op, cred: cred.clone(), volume, url: url.to_owned() };
        Ok(self.inner.session.change(self.inner.deadline(), make).await?.backup)
    }
    pub async fn backup_done(&self, volume: VolumeId, url: &str, outcome: &BackupOutcome) -> Result<Backup> {
        let make = |op| BackupDone { op, volume, url: url.to_owned(), outcome: outcome.clone() };
        self.inner.session.change(self.inner.deadline(), make).await
    }
}
