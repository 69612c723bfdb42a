//! Names of users and groups by number, as a program has looked them up on its machine. Unknown ones keep
//! their numbers.
use std::collections::BTreeMap;
use weir_proto::quota::{DEFAULT_ID, Holder, OwnerKind, OwnerUsage};

/// Users of a machine, or its groups, by number.
#[derive(Clone, Default)]
pub struct Users(BTreeMap<u32, String>);

impl Users {
    /// Lines of passwd(5) or group(5).
    pub fn parse(text: &str) -> Users {
        let one = |line: &str| {
            let mut fields = line.split(':');
            let (name, number) = (fields.next()?, fields.nth(1)?.parse().ok()?);
            // A name must not send control characters to a terminal.
            let is_plain = !name.is_empty() && !name.chars().any(|c| c.is_control() || c.is_whitespace());
            is_plain.then(|| (number, name.to_owned()))
        };
        // The first name of a number counts, as in the C library.
        let mut users = BTreeMap::new();
        for (number, name) in text.lines().filter_map(one) {
            users.entry(number).or_insert(name);
        }
        Users(users)
    }

    pub fn name(&self, number: u32) -> String {
        self.0.get(&number).cloned().unwrap_or_else(|| number.to_string())
    }
}

/// Names of the users and groups that have limits.
#[derive(Default)]
pub struct OwnerNames {
    pub users: Users,
    pub groups: Users,
}

impl OwnerNames {
    pub fn shown(&self, holder: &Holder) -> String {
        match (holder.kind, holder.id) {
            (OwnerKind::User, DEFAULT_ID) => "each other user".into(),
            (OwnerKind::Group, DEFAULT_ID) => "each other group".into(),
            (OwnerKind::User, id) => format!("user {}", self.users.name(id)),
            (OwnerKind::Group, id) => format!("group {}", self.groups.name(id)),
        }
    }
}

/// The numbers of this kind that need a name.
pub fn owners<'a>(rows: impl Iterator<Item = &'a OwnerUsage>, kind: OwnerKind) -> impl Iterator<Item = u32> {
    let named = rows.filter(move |row| row.holder.kind == kind && row.holder.id != DEFAULT_ID);
    named.map(|row| row.holder.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_first_name_or_its_number() {
        let users = Users::parse(
            "root:x:0:0:r:/root:/bin/sh\ntoor:x:0:0::/:\nada:*:1000:7::/:\nbad\n\u{1b}x:x:5:5\n:x:6:6\n",
        );
        assert_eq!([0, 1000, 5, 6].map(|n| users.name(n)), ["root", "ada", "5", "6"]);
    }
}
