//! `weir iohist`: the latencies of requests, disks, journals and homes, and their distribution.
use super::PATIENCE;
use super::args::IohistArgs;
use serde_json::json;
use std::time::Duration;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_coord::Collected;
use weir_diagnose::quantity::time;
use weir_diagnose::spreads::{Spread, spreads};
use weir_proto::Error;
use weir_proto::watch::{GetMeters, Meters};

pub fn iohist(args: &IohistArgs) -> Outcome<()> {
    let coordinators = coordinators(&args.cluster)?;
    let (before, now): (Vec<Collected<Meters>>, Vec<Collected<Meters>>) = observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir iohist").await?;
        let before = match args.seconds {
            0 => Vec::new(),
            seconds => {
                let before = cluster.collect(&GetMeters {}, PATIENCE).await?;
                env.clock.sleep(Duration::from_secs(seconds.into())).await;
                before
            }
        };
        Ok((before, cluster.collect(&GetMeters {}, PATIENCE).await?))
    })?;
    let is_wanted = |g: &&Collected<Meters>| args.process.as_ref().is_none_or(|name| *name == g.name);
    if !now.iter().any(|g| is_wanted(&g)) {
        let names: Vec<&str> = now.iter().map(|g| g.name.as_str()).collect();
        let error =
            Error::not_found(format!("no process {:?} answers", args.process.as_deref().unwrap_or("")));
        return Err(Failure::new(error, format!("processes: {}", names.join(", "))));
    }
    let spreads = spreads(&before, now.iter().filter(is_wanted));
    match args.cluster.json {
        true => table::json(&json!({ "spreads": spreads })),
        false => print!("{}", text(&spreads, args.rows)),
    }
    Ok(())
}

fn text(spreads: &[Spread], rows: usize) -> String {
    let row = |s: &Spread| {
        let (mean, p50, p99) = (time(s.mean_us), time(s.p50_us), time(s.p99_us));
        let (process, meter) = (s.process.clone(), s.meter.clone());
        vec![process, meter, s.of.clone(), s.count.to_string(), mean, p50, p99, time(s.total_us)]
    };
    let more = spreads.len().saturating_sub(rows);
    let rows: Vec<Vec<String>> = spreads.iter().take(rows).map(row).collect();
    let shown = table::render(&["PROCESS", "METER", "OF", "COUNT", "MEAN", "P50 <", "P99 <", "TOTAL"], &rows);
    match more {
        0 => shown,
        more => format!("{shown}{more} more rows: --rows N\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_left_out_are_counted() {
        let spread = Spread {
            process: "meta-1".into(),
            meter: "weir_rpc_seconds".into(),
            of: "Create".into(),
            count: 100,
            mean_us: 500,
            p50_us: 100,
            p99_us: 5000,
            total_us: 50_000,
        };
        let more = text(&[spread.clone(), spread], 1);
        assert!(more.ends_with("1 more rows: --rows N\n") && more.lines().count() == 3, "{more}");
    }
}
