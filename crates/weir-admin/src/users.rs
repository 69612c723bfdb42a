//! Names of users in output for people, as this machine's directory services know them. Other machines may
//! have others, so output for programs, and stored data, have numbers.
use std::process::Command;
use weir_diagnose::names::{OwnerNames, Users, owners};
use weir_proto::quota::{OwnerKind, OwnerUsage};

/// Looks up all of these at once.
pub fn of(numbers: impl IntoIterator<Item = u32>) -> Users {
    in_database("passwd", numbers)
}

/// The users and groups of these rows.
pub fn of_owners<'a>(rows: impl Iterator<Item = &'a OwnerUsage> + Clone) -> OwnerNames {
    let users = of(owners(rows.clone(), OwnerKind::User));
    OwnerNames { users, groups: in_database("group", owners(rows, OwnerKind::Group)) }
}

fn in_database(database: &str, numbers: impl IntoIterator<Item = u32>) -> Users {
    let mut numbers: Vec<u32> = numbers.into_iter().collect();
    numbers.sort_unstable();
    numbers.dedup();
    if numbers.is_empty() {
        return Users::default();
    }
    let asked = Command::new("getent").arg(database).args(numbers.iter().map(u32::to_string)).output();
    asked.map_or_else(|_| Users::default(), |found| Users::parse(&String::from_utf8_lossy(&found.stdout)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_names_its_superuser() {
        assert_eq!(of([0, 4_294_967_294]).name(0), "root");
        assert_eq!(of([]).name(7), "7");
        assert_eq!(in_database("group", [0]).name(0), "root");
    }
}
