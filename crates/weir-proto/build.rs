//! Finds ISA-L, the erasure-code library.
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let Ok(found) = Command::new("pkg-config").args(["--libs-only-L", "libisal"]).output() else {
        // No pkg-config here: the linker says so if the library is not in its path.
        println!("cargo:rustc-link-lib=isal");
        return;
    };
    if !found.status.success() {
        eprintln!("error: ISA-L was not found by pkg-config\nhint: install libisal-dev");
        std::process::exit(1);
    }
    for path in String::from_utf8_lossy(&found.stdout).split_whitespace().filter_map(|f| f.strip_prefix("-L"))
    {
        println!("cargo:rustc-link-search=native={path}");
    }
    println!("cargo:rustc-link-lib=isal");
}
