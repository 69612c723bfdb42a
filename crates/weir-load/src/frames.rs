//! Frames of a real detector, loaded from files into memory before the run.

use crate::failure::failed;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use weir_env::{Buf, BufferPool};
use weir_proto::{Error, Result};

/// Frames beyond this are omitted; the others are repeated.
const FRAMES_BYTES_MAX: usize = 512 << 20;

/// A frame in whole blocks, for direct I/O; zeros follow its bytes.
pub(crate) struct Frame {
    pub(crate) blocks: Buf,
    pub(crate) len: usize,
}

impl Frame {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.blocks[..self.len]
    }

    fn new(bytes: &[u8]) -> Frame {
        let mut blocks = BufferPool::new(0).zeroed(bytes.len().next_multiple_of(crate::block::BLOCK));
        blocks[..bytes.len()].copy_from_slice(bytes);
        Frame { blocks, len: bytes.len() }
    }
}

/// Reads `*.cbf`, and `*.cbf.bz2` through the system's bzip2, in the order of their names.
pub(crate) fn load(dir: &Path) -> Result<Vec<Frame>> {
    let entries = fs::read_dir(dir).map_err(|e| failed("list the frames in", dir, &e))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| failed("list the frames in", dir, &e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".cbf") || name.ends_with(".cbf.bz2") {
            paths.push(path);
        }
    }
    paths.sort();
    let (mut frames, mut total) = (Vec::new(), 0);
    for path in &paths {
        let bytes = load_one(path)?;
        total += bytes.len();
        if total > FRAMES_BYTES_MAX && !frames.is_empty() {
            break;
        }
        frames.push(Frame::new(&bytes));
    }
    if frames.is_empty() {
        return Err(Error::not_found(format!("no frame (*.cbf, *.cbf.bz2) is in {}", dir.display())));
    }
    Ok(frames)
}

fn load_one(path: &Path) -> Result<Vec<u8>> {
    let bytes = if path.extension().is_some_and(|e| e == "bz2") {
        let ran = Command::new("bzip2").arg("-dc").arg(path).stdin(Stdio::null()).output();
        let ran = ran.map_err(|e| failed("run bzip2 (is it installed?) for", path, &e))?;
        if !ran.status.success() {
            let why = String::from_utf8_lossy(&ran.stderr);
            return Err(Error::damaged(format!("bzip2 cannot read {}: {}", path.display(), why.trim())));
        }
        ran.stdout
    } else {
        fs::read(path).map_err(|e| failed("read the frame", path, &e))?
    };
    if bytes.is_empty() {
        return Err(Error::invalid(format!("the frame {} is empty", path.display())));
    }
    Ok(bytes)
}
