//! Names of users in output for people. This machine's directory services know them; other machines may have
//! others, so output for programs, and stored data, have numbers.
use std::collections::BTreeMap;
use std::process::Command;

/// Users of this machine, by number.
#[derive(Clone, Default)]
pub struct Users(BTreeMap<u32, String>);

impl Users {
    /// Looks up all of these at once. Unknown users keep their numbers.
    pub fn of(numbers: impl IntoIterator<Item = u32>) -> Users {
        Users::in_database("passwd", numbers)
    }
    /// The same for groups.
    pub fn of_groups(numbers: impl IntoIterator<Item = u32>) -> Users {
        Users::in_database("group", numbers)
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

    /// Lines of passwd(5) or group(5).
    fn parse(text: &str) -> Users {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_its_first_name_or_its_number() {
        let users = Users::parse(
            "root:x:0:0:r:/root:/bin/sh\ntoor:x:0:0::/:\nada:*:1000:7::/:\nbad\n\u{1b}x:x:5:5\n:x:6:6\n",
        );
        assert_eq!([0, 1000, 5, 6].map(|n| users.name(n)), ["root", "ada", "5", "6"]);
        assert_eq!(Users::of([0, 4_294_967_294]).name(0), "root");
        assert_eq!(Users::of([]).name(7), "7");
        assert_eq!(Users::of_groups([0]).name(0), "root");
    }
}
