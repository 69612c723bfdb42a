//! Rows of data: one file that is streamed, and random reads of it.
use super::{Measured, RDWR_IO_BYTES, Scene};
use crate::block::Pattern;
use crate::failure::failed;
use crate::work::{open_options, touched};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use weir_env::Buf;
use weir_proto::Result;

const STREAM_IO_BYTES: u64 = 1 << 20;

pub(super) const RANDOM_BYTES: u64 = 4096;

/// Rows that run from memory are repeated for this time: one pass would be too short for the clock.
pub(super) const WARM_LONG_ENOUGH: Duration = Duration::from_millis(200);
/// Fewer pages than this, in percent, are ignored: another process may have read them since.
const STAYED_PERCENT: u64 = 1;

impl<'a> Scene<'a> {
    pub(super) fn stream(&self) -> PathBuf {
        self.root.path().join("stream")
    }
    fn stream_bytes(&self) -> u64 {
        self.options.size.next_multiple_of(STREAM_IO_BYTES)
    }
    pub(super) fn stream_write(&mut self) -> Result<Measured> {
        let (path, bytes) = (self.stream(), self.stream_bytes());
        if self.made.stream {
            fs::remove_file(&path).map_err(|e| failed("remove", &path, &e))?;
        }
        let written = self.write_in_order(&path, bytes, STREAM_IO_BYTES, false)?;
        self.made.stream = true;
        Ok(written)
    }

    fn needs_stream(&mut self) -> Result<()> {
        if !self.made.stream {
            self.stream_write()?;
        }
        Ok(())
    }

    pub(super) fn rdwr_write(&mut self) -> Result<Measured> {
        let path = self.root.path().join("rdwr");
        let written = self.write_in_order(&path, self.stream_bytes(), RDWR_IO_BYTES, true)?;
        fs::remove_file(&path).map_err(|e| failed("remove", &path, &e))?;
        Ok(written)
    }

    fn write_in_order(&self, path: &Path, bytes: u64, io_bytes: u64, also_read: bool) -> Result<Measured> {
        let io = |doing: &'static str| move |e: io::Error| failed(doing, path, &e);
        // In the measured time only headers are written: see `Stream::write`.
        let count = Pattern::period() / io_bytes;
        let mut buffers: Vec<Buf> = (0..count.min(bytes / io_bytes))
            .map(|n| {
                let mut buf = touched(io_bytes as usize);
                self.pattern.fill(0, n * io_bytes, &mut buf);
                buf
            })
            .collect();
        let start = Instant::now();
        let file = open_options(false).read(also_read).write(true).create_new(true).open(path);
        let file = file.map_err(io("create"))?;
        for n in 0..bytes / io_bytes {
            self.stop.check()?;
            let buf = &mut buffers[(n % count) as usize];
            self.pattern.write_headers(0, n * io_bytes, buf);
            file.write_all_at(buf, n * io_bytes).map_err(io("write"))?;
        }
        file.sync_all().map_err(io("fsync"))?;
        drop(file);
        Ok(Measured::since(bytes, start))
    }

    pub(super) fn cold_read(&mut self) -> Result<Measured> {
        self.needs_stream()?;
        let path = self.cold(&self.stream());
        let io = |doing: &'static str| move |path: &Path, e: io::Error| failed(doing, path, &e);
        let mut buf = touched(STREAM_IO_BYTES as usize);
        let file = File::open(&path).map_err(|e| io("open")(&path, e))?;
        self.drop_pages(&file, self.stream_bytes());
        let start = Instant::now();
        for n in 0..self.stream_bytes() / STREAM_IO_BYTES {
            self.stop.check()?;
            let offset = n * STREAM_IO_BYTES;
            file.read_exact_at(&mut buf, offset).map_err(|e| io("read")(&path, e))?;
            self.compare(&path, 0, offset, &buf);
        }
        Ok(Measured::since(self.stream_bytes(), start))
    }

    /// Compares with `object` as it was written, from byte `offset` of it on.
    pub(super) fn compare(&mut self, path: &Path, object: u64, offset: u64, buf: &[u8]) {
        if let Err(at) = self.pattern.check(object, offset, buf) {
            self.note_bad(|| format!("{} differs in the 4 KiB of byte {}", path.display(), at.offset));
        }
    }

    pub(super) fn drop_pages(&mut self, file: &File, bytes: u64) {
        // Only clean pages can be dropped.
        let dropped = rustix::fs::fdatasync(file)
            .and_then(|()| rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed));
        if let Err(e) = dropped {
            self.drops.refused.get_or_insert_with(|| io::Error::from(e).to_string());
        }
        match weir_env::real::cached_bytes(file.as_fd()) {
            Some(stayed) => {
                let percent = stayed * 100 / bytes.max(1);
                if percent > STAYED_PERCENT {
                    self.drops.stayed_percent = self.drops.stayed_percent.max(percent.min(100));
                }
            }
            None => self.drops.unknown = true,
        }
    }

    /// The offset of the `n`th of this round's reads; the same for every directory.
    fn place(&self, n: u64) -> u64 {
        let mut z = (self.options.seed << 40 ^ self.round << 32 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // SplitMix64's last steps (Steele, Lea, Flood 2014).
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % (self.stream_bytes() / RANDOM_BYTES) * RANDOM_BYTES
    }

    fn random_pass(&mut self, path: &Path, file: &File, buf: &mut [u8]) -> Result<u64> {
        for n in 0..self.options.ops {
            self.stop.check()?;
            let offset = self.place(n);
            file.read_exact_at(buf, offset).map_err(|e| failed("read", path, &e))?;
            self.compare(path, 0, offset, buf);
        }
        Ok(self.options.ops)
    }

    pub(super) fn random_cold(&mut self) -> Result<Measured> {
        self.needs_stream()?;
        let path = self.cold(&self.stream());
        let mut buf = touched(RANDOM_BYTES as usize);
        let file = File::open(&path).map_err(|e| failed("open", &path, &e))?;
        self.drop_pages(&file, self.stream_bytes());
        let start = Instant::now();
        let read = self.random_pass(&path, &file, &mut buf)?;
        Ok(Measured::since(read, start))
    }

    pub(super) fn random_again(&mut self, also_write: bool) -> Result<Measured> {
        self.needs_stream()?;
        let path = self.stream();
        let mut buf = touched(RANDOM_BYTES as usize);
        let file = OpenOptions::new().read(true).write(also_write).open(&path);
        let file = file.map_err(|e| failed("open", &path, &e))?;
        self.random_pass(&path, &file, &mut buf)?;
        let (mut read, start) = (0, Instant::now());
        while start.elapsed() < WARM_LONG_ENOUGH {
            read += self.random_pass(&path, &file, &mut buf)?;
        }
        Ok(Measured::since(read, start))
    }
}
