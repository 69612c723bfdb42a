//! Writes each target's valid inputs to `corpus/TARGET/`, where libFuzzer begins.
use std::{fs, io, path::Path};

fn main() -> io::Result<()> {
    for target in weir_decoders::TARGETS {
        let dir = Path::new("corpus").join(target.name);
        fs::create_dir_all(&dir)?;
        for (n, seed) in (target.seeds)().iter().enumerate() {
            fs::write(dir.join(format!("seed-{n:03}")), seed)?;
        }
    }
    Ok(())
}
