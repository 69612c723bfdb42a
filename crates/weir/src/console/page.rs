//! The page: its frame and the first answer to "is everything all right?"; `console.js` fills the screens.
use maud::{DOCTYPE, html};
use serde_json::Value;

/// Names of screens, as shown and as used in `console.js`. Their keys are 1 to 8.
const SCREENS: [(&str, &str); 8] = [
    ("overview", "All right?"),
    ("who", "Who"),
    ("machines", "Machines"),
    ("volumes", "Volumes"),
    ("homes", "Homes"),
    ("waits", "Waits"),
    ("events", "Events"),
    ("proof", "Proof"),
];

/// The icon of the tab before the script draws one in the color of the state.
const ICON: &str = "data:,";

pub fn page(status: &Value) -> String {
    let word = status["word"].as_str().unwrap_or_default();
    let state = status["state"].as_str().unwrap_or_default();
    let words = state.strip_prefix(word).unwrap_or(state).trim_start_matches([':', ';', ' ']);
    let kind = match (status["healthy"] == true, word) {
        (true, _) => "good",
        (false, "warning") => "warn",
        (false, _) => "bad",
    };
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { @if !word.is_empty() { (word) " – " } "Weir" }
                link id="icon" rel="icon" href=(ICON);
                link rel="stylesheet" href="/console.css";
                script type="module" src="/console.js" {}
            }
            body {
                header {
                    h1 { "Weir" }
                    nav aria-label="Screens" {
                        @for (at, (name, title)) in SCREENS.iter().enumerate() {
                            a href={ "#" (name) } data-screen=(name) accesskey=(at + 1) title={ "key " (at + 1) } { (title) }
                        }
                    }
                    p id="as-of" {}
                    p id="state" class=(kind) role="status" { b { (word) } span { (words) } }
                }
                main id="screen" tabindex="-1" { p { "Loading…" } }
                noscript { p { "This page needs JavaScript. The same is shown by weir status, weir top and weir waits." } }
            }
        }
    };
    page.into_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_its_screens_and_lets_no_text_be_markup() {
        let status = serde_json::json!({ "healthy": false, "state": "<script>alert(1)</script>" });
        let text = page(&status);
        assert!(SCREENS.iter().all(|(name, _)| text.contains(&format!("data-screen=\"{name}\""))));
        assert!(text.contains("&lt;script&gt;alert(1)") && text.contains("class=\"bad\""), "{text}");
        let status =
            serde_json::json!({ "healthy": false, "word": "warning", "state": "warning: all is well; 6 up" });
        let text = page(&status);
        assert!(text.contains("<title>warning – Weir</title>") && text.contains("class=\"warn\""), "{text}");
        assert!(text.contains("<b>warning</b><span>all is well; 6 up</span>"), "{text}");
    }
}
