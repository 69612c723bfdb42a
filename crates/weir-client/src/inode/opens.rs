//! The number of opens of one inode here.

#[derive(Debug, Default)]
pub struct Opens {
    read: u32,
    write: u32,
    /// A process has locked something here: later closes are announced before they end.
    closes_unlock: bool,
}

impl Opens {
    pub fn begin(&mut self, read: bool, write: bool) {
        self.read += u32::from(read);
        self.write += u32::from(write);
    }
    pub fn end(&mut self, reads: u32, writes: u32) {
        assert!(reads <= self.read && writes <= self.write, "what ends had begun");
        self.read -= reads;
        self.write -= writes;
    }
    pub fn for_reading(&self) -> u32 {
        self.read
    }
    pub fn for_writing(&self) -> u32 {
        self.write
    }
    pub fn is_for_writing(&self) -> bool {
        self.write > 0
    }
    pub fn is_open(&self) -> bool {
        self.read + self.write > 0
    }
    pub fn closes_unlock(&self) -> bool {
        self.closes_unlock
    }
    pub fn note_locked(&mut self) {
        self.closes_unlock = true;
    }
}
