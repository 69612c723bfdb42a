//! `weir file stat|layout|locks`: the mount's information on one file.
use super::args::OnePath;
use serde_json::Value;
use weir_admin::attribute;
use weir_admin::failure::Outcome;
use weir_admin::table;
use weir_diagnose::quantity::when;
use weir_proto::meta::Time;

pub fn stat(args: &OnePath) -> Outcome<()> {
    show(args, attribute::STAT)
}

pub fn layout(args: &OnePath) -> Outcome<()> {
    show(args, attribute::LAYOUT)
}

fn show(args: &OnePath, attribute: &str) -> Outcome<()> {
    let value = attribute::ask(&args.path, attribute)?;
    if args.json {
        table::json(&value);
        return Ok(());
    }
    println!("{}", args.path.display());
    let mut rows = Vec::new();
    for (key, value) in value.as_object().into_iter().flatten() {
        match value {
            Value::Array(_) | Value::Null => {} // the table below, and absent facts
            _ => match (key.strip_suffix("_ns"), value.as_i64()) {
                (Some(key), Some(nanos)) => rows.push(vec![format!("  {key}"), when(Time { nanos })]),
                _ => rows.push(vec![format!("  {key}"), plain(value)]),
            },
        }
    }
    print!("{}", table::render(&["", ""], &rows).trim_start_matches('\n'));
    if let Some(Value::Array(stripes)) = value.get("stripes").filter(|_| value["data"].is_null()) {
        print!("{}", stripes_table(stripes));
    }
    Ok(())
}

pub fn locks(args: &OnePath) -> Outcome<()> {
    let value = attribute::ask(&args.path, attribute::LOCKS)?;
    if args.json {
        table::json(&value);
        return Ok(());
    }
    let locks = value["locks"].as_array().map_or(&[][..], Vec::as_slice);
    if locks.is_empty() {
        println!("{}: no locks", args.path.display());
        return Ok(());
    }
    let columns = ["state", "lock", "kind", "range", "client", "pid", "age"];
    let rows: Vec<Vec<String>> = locks
        .iter()
        .map(|lock| columns.map(|key| lock.get(key).map(plain).unwrap_or_default()).to_vec())
        .collect();
    print!("{}", table::render(&["STATE", "LOCK", "KIND", "BYTES", "CLIENT", "PID", "AGE"], &rows));
    if let Some(more) = value["more"].as_u64().filter(|more| *more > 0) {
        println!("and {more} more");
    }
    Ok(())
}

fn stripes_table(stripes: &[Value]) -> String {
    let cell = |stripe: &Value, key: &str| stripe.get(key).map(plain).unwrap_or_default();
    let rows: Vec<Vec<String>> = stripes
        .iter()
        .map(|s| ["stripe", "group", "data", "parity"].map(|key| cell(s, key)).to_vec())
        .collect();
    table::render(&["STRIPE", "GROUP", "DATA ON", "PARITY ON"], &rows)
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}
