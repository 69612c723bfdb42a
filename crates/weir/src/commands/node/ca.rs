//! `weir ca`: the authority that signs the cluster's certificates, and how it is replaced.
use super::args::CaCommand;
use super::enrol::ask;
use serde_json::json;
use weir_admin::failure::Outcome;
use weir_admin::{certificate, table};
use weir_proto::enrol::{Enrolment, GetEnrolment, Holder, RotateAuthority};

/// `weir ca`.
pub fn ca(command: &CaCommand) -> Outcome<()> {
    let (known, json) = match command {
        CaCommand::List(at) => (ask(at, &GetEnrolment {})?, at.json),
        CaCommand::Rotate(args) => {
            (ask(&args.cluster, &RotateAuthority { skip: args.skip_missing })?, args.cluster.json)
        }
    };
    let missing = missing(&known);
    if json {
        let authorities: Vec<String> = known.authorities.iter().map(pin).collect();
        table::json(&json!({
            "authorities": authorities, "signs": authorities.first(), "rotating": authorities.len() > 1,
            "waits_for": missing,
        }));
        return Ok(());
    }
    let row = |(n, authority): (usize, &[u8; 16])| {
        vec![pin(authority), if n == 0 { "signs" } else { "is believed" }.to_owned()]
    };
    let rows: Vec<Vec<String>> = known.authorities.iter().enumerate().map(row).collect();
    print!("{}", table::render(&["AUTHORITY", "STATE"], &rows));
    if known.authorities.len() > 1 {
        println!("the authority is being replaced; waiting for {}", missing.join(", "));
        println!(
            "hint: nodes that run take the new certificates within a minute, people's certificates with their next \
             command; `weir ca rotate --skip-missing` leaves the others behind"
        );
    }
    Ok(())
}

/// The nodes that have not confirmed the newest step of a rotation.
fn missing(known: &Enrolment) -> Vec<&str> {
    let now = certificate::now()();
    let waits = |held: &&Holder| !held.removed && held.until > now && held.round < known.round;
    known.holders.iter().filter(waits).map(|held| held.name.as_str()).collect()
}

fn pin(authority: &[u8; 16]) -> String {
    authority.iter().map(|byte| format!("{byte:02x}")).collect()
}
