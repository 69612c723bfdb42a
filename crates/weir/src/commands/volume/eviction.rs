//! `weir volume eviction`: the fill levels of pools and volumes, the eviction watermarks, and a volume's own
//! ones.
use clap::Args;
use serde_json::{Value, json};
use weir_admin::failure::{Failure, Outcome};
use weir_admin::namespace_client::{Cluster, named, own_cred};
use weir_admin::table;
use weir_client::Client;
use weir_proto::recall::{EvictionLevel, SetMarks};
use weir_proto::{Error, VolumeId};

#[derive(Args)]
pub struct Eviction {
    /// The volume whose thresholds are set [default: show all]
    pub name: Option<String>,
    /// Start evicting when usage exceeds this percentage of the limit
    #[arg(long, value_name = "PERCENT", requires = "name", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub high: Option<u8>,
    /// Stop evicting at this percentage [default: 5 below]
    #[arg(long, value_name = "PERCENT", requires = "high", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub low: Option<u8>,
    /// Choose the thresholds automatically, from the fill rate
    #[arg(long, requires = "name", conflicts_with = "high")]
    pub auto: bool,
    #[command(flatten)]
    pub at: Cluster,
}

/// Levels, with the names of their volumes.
pub type Named = Vec<(String, EvictionLevel)>;

/// Sets marks, if any are named, and asks for all levels.
pub async fn ask(client: &Client, args: &Eviction) -> Outcome<Named> {
    if args.name.is_some() && args.high.is_none() && !args.auto {
        return Err(Failure::new(Error::invalid("no threshold is given"), "give --high PERCENT, or --auto"));
    }
    let set = match &args.name {
        None => None,
        Some(name) => {
            let high = args.high.unwrap_or(0);
            let low = args.low.unwrap_or(high.saturating_sub(5));
            Some(SetMarks { volume: named(client, name).await?.id, high, low })
        }
    };
    let mut levels = Vec::new();
    for level in client.eviction(&own_cred(), set).await? {
        let name = match level.volume {
            None => "all targets".to_owned(),
            Some(id) => {
                // The first one after the previous number.
                let (found, _) = client.volumes(VolumeId(id.0.saturating_sub(1))).await?;
                found.into_iter().find(|v| v.id == id).map_or_else(|| id.to_string(), |v| v.name)
            }
        };
        levels.push((name, level));
    }
    Ok(levels)
}

pub fn show(levels: &[(String, EvictionLevel)], json: bool) {
    let value = |(name, l): &(String, EvictionLevel)| -> Value {
        json!({
            "name": name, "volume": l.volume.map(|v| v.0), "capacity": l.capacity, "used": l.used, "high": l.high,
            "low": l.low, "set": l.is_set, "bytes_per_s": l.bytes_per_s, "evicting": l.evicting,
            "evicted": l.evicted,
        })
    };
    if json {
        table::json(&json!({ "levels": levels.iter().map(value).collect::<Vec<_>>() }));
        return;
    }
    if levels.is_empty() {
        println!("nothing is evicted: no relation allows it, or the first scan is not done yet");
        return;
    }
    let percent = |part: u64, of: u64| format!("{} %", u128::from(part) * 100 / u128::from(of.max(1)));
    let row = |(name, l): &(String, EvictionLevel)| {
        vec![
            name.clone(),
            percent(l.used, l.capacity),
            percent(l.high, l.capacity),
            percent(l.low, l.capacity),
            if l.is_set { "set" } else { "automatic" }.to_owned(),
            format!("{} MB/s", l.bytes_per_s / 1_000_000),
            l.evicted.to_string(),
            if l.evicting { "evicting" } else { "" }.to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = levels.iter().map(row).collect();
    let header = ["NAME", "USED", "ABOVE", "DOWN TO", "THRESHOLDS", "FILL RATE", "EVICTED BYTES", ""];
    print!("{}", table::render(&header, &rows));
}
