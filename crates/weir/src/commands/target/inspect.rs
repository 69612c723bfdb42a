//! `weir inspect`: a target's directory decoded offline, printed as text or JSON.
use super::args;
use serde_json::json;
use std::process::ExitCode;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::local::local_cluster;
use weir_admin::observe::block_on;
use weir_admin::table;
use weir_proto::ErrorKind;
use weir_store::inspect::{Finding, InspectOptions, Summary, inspect as decode};

/// Exit code when the target has problems: "the answer is no".
const PROBLEMS: u8 = 1;

pub fn inspect(args: &args::Inspect) -> Outcome<ExitCode> {
    let dir = local_cluster::absolute(&args.dir)?;
    let options = InspectOptions { check: args.check, cell: None };
    let mut findings = Vec::new();
    let json = args.json;
    let summary = block_on(async {
        let env = weir_env::real::env();
        let mut report = |finding: Finding| match &finding {
            _ if json => findings.push(finding),
            Finding::Problem { .. } => println!("{}", line(&finding)),
            _ if args.summary => {}
            _ => println!("{}", line(&finding)),
        };
        decode(&env, &dir, options, &mut report).await.map_err(|e| match e.kind {
            ErrorKind::Exists => Failure::new(e, "stop its process first: `weir down --dir DIR`"),
            ErrorKind::NotFound => Failure::new(e, "name a target's directory, such as DIR/t1"),
            _ => e.into(),
        })
    })?;
    if json {
        println!(
            "{:#}",
            json!({ "dir": dir, "checked": args.check, "summary": summary, "findings": findings })
        );
    } else {
        print!("{}", totals(&summary, args.check));
    }
    Ok(if summary.problems == 0 { ExitCode::SUCCESS } else { ExitCode::from(PROBLEMS) })
}

fn line(finding: &Finding) -> String {
    match finding {
        Finding::Cell { cell, group, epoch, scheme, missing, last_seq, folded_seq } => {
            let missing_shown =
                if *missing == 0 { String::new() } else { format!(", fragments missing: mask {missing:#b}") };
            format!(
                "cell {cell}: {scheme} on pg{group} e{epoch}, overlays up to {last_seq}, sealed up to {folded_seq}{missing_shown}"
            )
        }
        Finding::Base { version, bytes, addr, blocks, folded_seqs, .. } => {
            let folded_seqs = if folded_seqs.is_empty() {
                String::new()
            } else {
                format!(", overlays up to {folded_seqs:?}")
            };
            format!("  base {version}: {bytes} bytes at {addr:#x}, {blocks} checksums{folded_seqs}")
        }
        Finding::Prepared { version, bytes, addr, seal, .. } => {
            let by = if *seal { "a seal" } else { "a writer" };
            format!("  prepared {version} by {by}: {bytes} bytes at {addr:#x}")
        }
        Finding::Overlay { seq, offset, len, zero, token_epoch, in_slab, .. } => {
            let kind = if *zero {
                "zeros"
            } else if *in_slab {
                "in a slab"
            } else {
                "in the index"
            };
            format!(
                "  overlay {seq}: bytes {offset}..{}, {kind}, token epoch {token_epoch}",
                u64::from(*offset) + u64::from(*len)
            )
        }
        Finding::Fence { file, token_epoch } => {
            format!("fence {file}: writes below token epoch {token_epoch} are refused")
        }
        Finding::Group { group, epoch } => format!("group pg{group}: epoch {epoch}"),
        Finding::Problem { problem } => format!("PROBLEM: {problem}"),
    }
}

fn totals(s: &Summary, checked: bool) -> String {
    let verified = if checked {
        format!("{} verified", table::bytes(s.verified_bytes))
    } else {
        "bytes not verified (--check does)".into()
    };
    format!(
        "{} cells: {} bases, {} prepared, {} overlays; {} lack fragments\n\
         {} in fragments, {} in overlays; slabs: {} used, {} free\n\
         {verified}; {} problems\n",
        s.cells,
        s.bases,
        s.prepared,
        s.overlays,
        s.cells_missing_fragments,
        table::bytes(s.fragment_bytes),
        table::bytes(s.overlay_bytes),
        table::bytes(s.used_bytes),
        table::bytes(s.free_bytes),
        s.problems
    )
}
