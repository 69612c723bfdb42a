//! The index of a target: the engine in `index/` of its directory, with its budget of memory.
use std::path::Path;
use weir_env::Env;
use weir_kv::SharedKv;
use weir_kv::{Engine, EngineConfig};
use weir_proto::{Error, Result};

/// Overlay data is written to the journal; its changes are also in memory, at two to three times their size.
/// With cached pages of the index, and with buffers, a process stays below 256 MiB.
pub const INDEX: EngineConfig =
    EngineConfig { cache_bytes: 32 << 20, journal_bytes_max: 48 << 20, journal_keep_bytes: 0 };

/// Opens the index of the target in `dir`, or makes an empty one.
pub async fn open_index(env: &Env, dir: &Path) -> Result<SharedKv> {
    open_index_with(env, dir, INDEX).await
}

/// Like [`open_index`], with another memory budget.
pub async fn open_index_with(env: &Env, dir: &Path, budget: EngineConfig) -> Result<SharedKv> {
    let at = dir.join("index");
    let (dir, disk) = (dir.to_owned(), env.disk.clone());
    let making = move || {
        disk.create_dir_all(&dir)?;
        // The directory entry of the target must be durable, too; the engine syncs that of `index/`.
        disk.sync_dir(dir.parent().unwrap_or(Path::new("/")))
    };
    let made = env.tasks.blocking(making).await;
    made.map_err(|e| Error::from_io(format_args!("make the directory of {}", at.display()), &e))?;
    let engine = Engine::open(env, &at, budget).await.map_err(|e| e.doing("open the index"))?;
    Ok(engine)
}
