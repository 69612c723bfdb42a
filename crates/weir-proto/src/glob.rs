//! Globs for names in rules and tokens.

/// Whether a word matches a glob: `*` stands for any characters, also none, `?` for one.
pub fn fits(glob: &str, word: &str) -> bool {
    let (glob, word): (Vec<char>, Vec<char>) = (glob.chars().collect(), word.chars().collect());
    let (mut g, mut w) = (0, 0);
    // The position to continue from after the last `*`, if it takes one more character.
    let mut retry = None;
    while w < word.len() {
        match glob.get(g) {
            Some('*') => {
                retry = Some((g + 1, w));
                g += 1;
            }
            Some(c) if *c == '?' || *c == word[w] => (g, w) = (g + 1, w + 1),
            _ => {
                let Some((after, taken)) = retry else { return false };
                (g, w) = (after, taken + 1);
                retry = Some((after, taken + 1));
            }
        }
    }
    glob[g..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_any_text_and_a_question_mark_one_character() {
        for (glob, word) in [
            ("*", ""),
            ("*", "a"),
            ("node-*", "node-"),
            ("node-*", "node-17"),
            ("n?de", "node"),
            ("*a*b", "xaab"),
            ("a**", "a"),
            ("é?", "éö"),
        ] {
            assert!(fits(glob, word), "{glob} {word}");
        }
        for (glob, word) in [
            ("", "a"),
            ("node-*", "nod"),
            ("?", ""),
            ("a", "A"),
            ("*a", "ab"),
            ("node", "node-1"),
            ("*a*b", "ba"),
        ] {
            assert!(!fits(glob, word), "{glob} {word}");
        }
        let many = "*a".repeat(120);
        assert!(!fits(&many, &format!("{}b", "a".repeat(250))), "and that quickly");
    }
}
