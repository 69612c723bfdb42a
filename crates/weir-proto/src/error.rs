//! The kinds of errors that a caller can act on, and three total matches: kind → errno, HTTP status, exit
//! code.
use crate::wire::{Reader, Wire, Writer};
use std::borrow::Cow;
use std::fmt;

pub type Result<T> = std::result::Result<T, Error>;

/// A kind, and a message: what happened, and where. The text starts lower-case and is a complete statement.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    pub kind: ErrorKind,
    pub context: String,
    /// A remedy, for the reader.
    pub hint: Option<Cow<'static, str>>,
}

/// The POSIX rule that refuses a name operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NameRule {
    NotDirectory,
    IsDirectory,
    NotEmpty,
    TooLong,
    CrossVolume,
    Loop,
    TooManyLinks,
    NoAttribute,
    Range,
    FileTooBig,
    Busy,
    /// Reserved to the owner or the administrator, regardless of the mode bits (EPERM, not EACCES).
    NotOwner,
    /// Read only for all users, root included: the content mirrors another place.
    ReadOnly,
}

/// Kinds by what the caller can do about the error. A kind exists only if a caller would act differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// It does not exist.
    NotFound,
    /// It exists already.
    Exists,
    /// The request itself is wrong: do not send it again.
    Invalid,
    /// The caller lacks the permission.
    Denied,
    /// POSIX refuses the name operation.
    Name(NameRule),
    /// No space.
    NoSpace,
    /// An epoch, token, session or handle is out of date: refresh it, then try again.
    Stale,
    /// The peer cannot be reached or is not ready: try again until the deadline, elsewhere if possible.
    Unavailable,
    /// The peer lives, has more work than it can do in time, and has not begun the request. Pause that long,
    /// then ask the same peer again: nothing is wrong with it. Travels as `Unavailable`, with the pause in
    /// the header of its frame, for peers that do not know it.
    Busy { wait_ms: u32 },
    /// The deadline passed.
    Deadline,
    /// Bytes are lost or fail their checksum beyond what redundancy can repair.
    Damaged,
    /// This node does not support that.
    Unsupported,
    /// A disk or the operating system failed.
    Io,
    /// A volume's limit is reached: remove files there, or raise the limit.
    OverQuota,
}

const NAME_RULES: [NameRule; 13] = [
    NameRule::NotDirectory,
    NameRule::IsDirectory,
    NameRule::NotEmpty,
    NameRule::TooLong,
    NameRule::CrossVolume,
    NameRule::Loop,
    NameRule::TooManyLinks,
    NameRule::NoAttribute,
    NameRule::Range,
    NameRule::FileTooBig,
    NameRule::Busy,
    NameRule::NotOwner,
    NameRule::ReadOnly,
];
const KINDS: [ErrorKind; 12] = [
    ErrorKind::NotFound,
    ErrorKind::Exists,
    ErrorKind::Invalid,
    ErrorKind::Denied,
    ErrorKind::NoSpace,
    ErrorKind::Stale,
    ErrorKind::Unavailable,
    ErrorKind::Deadline,
    ErrorKind::Damaged,
    ErrorKind::Unsupported,
    ErrorKind::Io,
    ErrorKind::OverQuota,
];
/// Wire number of the first name rule; kinds are 1 to 12.
const NAME_RULE_BASE: u8 = 32;

impl ErrorKind {
    /// Wire number, never 0.
    pub fn number(self) -> u8 {
        match self {
            ErrorKind::Busy { .. } => ErrorKind::Unavailable.number(),
            ErrorKind::Name(rule) => {
                NAME_RULE_BASE + NAME_RULES.iter().position(|r| *r == rule).expect("listed") as u8
            }
            kind => 1 + KINDS.iter().position(|k| *k == kind).expect("listed") as u8,
        }
    }
    pub fn from_number(n: u8) -> Option<ErrorKind> {
        if n >= NAME_RULE_BASE {
            NAME_RULES.get(usize::from(n - NAME_RULE_BASE)).map(|r| ErrorKind::Name(*r))
        } else {
            KINDS.get(usize::from(n).checked_sub(1)?).copied()
        }
    }
    /// The errno of a system call (Linux numbers).
    pub fn errno(self) -> i32 {
        match self {
            ErrorKind::NotFound => 2,
            ErrorKind::Exists => 17,
            ErrorKind::Invalid => 22,
            ErrorKind::Denied => 13,
            ErrorKind::NoSpace => 28,
            ErrorKind::Stale => 116,
            ErrorKind::Unavailable => 5,
            ErrorKind::Deadline | ErrorKind::Busy { .. } => 110,
            ErrorKind::Damaged => 5,
            ErrorKind::Unsupported => 95,
            ErrorKind::Io => 5,
            ErrorKind::OverQuota => 122,
            ErrorKind::Name(rule) => match rule {
                NameRule::NotDirectory => 20,
                NameRule::IsDirectory => 21,
                NameRule::NotEmpty => 39,
                NameRule::TooLong => 36,
                NameRule::CrossVolume => 18,
                NameRule::Loop => 40,
                NameRule::TooManyLinks => 31,
                NameRule::NoAttribute => 61,
                NameRule::Range => 34,
                NameRule::FileTooBig => 27,
                NameRule::Busy => 16,
                NameRule::NotOwner => 1,
                NameRule::ReadOnly => 30,
            },
        }
    }
    /// The status of an HTTP answer.
    pub fn http_status(self) -> u16 {
        match self {
            ErrorKind::NotFound => 404,
            ErrorKind::Exists => 409,
            ErrorKind::Invalid | ErrorKind::Name(_) => 400,
            ErrorKind::Denied => 403,
            ErrorKind::NoSpace | ErrorKind::OverQuota => 507,
            ErrorKind::Stale => 409,
            ErrorKind::Unavailable | ErrorKind::Busy { .. } => 503,
            ErrorKind::Deadline => 504,
            ErrorKind::Damaged | ErrorKind::Io => 500,
            ErrorKind::Unsupported => 501,
        }
    }
    /// The exit code of a command (1 is reserved for "the answer is no"). The program's help lists them.
    pub fn exit_code(self) -> u8 {
        match self {
            ErrorKind::Name(NameRule::NotEmpty | NameRule::Busy) => 4,
            ErrorKind::Name(NameRule::NotOwner | NameRule::ReadOnly) => 5,
            ErrorKind::Invalid | ErrorKind::Name(_) => 2,
            ErrorKind::NotFound => 3,
            ErrorKind::Exists => 4,
            ErrorKind::Denied => 5,
            ErrorKind::NoSpace => 6,
            ErrorKind::Stale => 7,
            ErrorKind::Unavailable | ErrorKind::Busy { .. } => 8,
            ErrorKind::Deadline => 9,
            ErrorKind::Damaged => 10,
            ErrorKind::Unsupported => 11,
            ErrorKind::Io => 12,
            ErrorKind::OverQuota => 13,
        }
    }
}

macro_rules! constructors {
    ($($fn:ident => $kind:ident),*) => {$(
        pub fn $fn(context: impl Into<String>) -> Error {
            Error::new(ErrorKind::$kind, context)
        }
    )*};
}
impl Error {
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Error {
        Error { kind, context: context.into(), hint: None }
    }
    /// Reads what `Display` wrote: an error that was sent or kept as one text.
    pub fn of_text(kind: ErrorKind, text: impl Into<String>) -> Error {
        let mut context: String = text.into();
        let (before, hint) = split_hint(&context);
        let (end, hint) = (before.len(), hint.map(|hint| Cow::Owned(hint.to_owned())));
        context.truncate(end);
        Error { kind, context, hint }
    }
    constructors!(not_found => NotFound, exists => Exists, invalid => Invalid, denied => Denied,
        no_space => NoSpace, stale => Stale, unavailable => Unavailable, deadline => Deadline,
        damaged => Damaged, unsupported => Unsupported, io => Io, over_quota => OverQuota);
    /// The work cannot be begun in time; the caller should pause that long.
    pub fn busy(wait: std::time::Duration, context: impl Into<String>) -> Error {
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX).max(1);
        Error::new(ErrorKind::Busy { wait_ms }, context)
    }
    pub fn name(rule: NameRule, context: impl Into<String>) -> Error {
        Error::new(ErrorKind::Name(rule), context)
    }
    /// An I/O failure of the machine, with the operation (a verb phrase: "open the journal").
    pub fn from_io(doing: impl fmt::Display, e: &std::io::Error) -> Error {
        let kind = match e.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            std::io::ErrorKind::PermissionDenied => ErrorKind::Denied,
            std::io::ErrorKind::AddrInUse => ErrorKind::Exists,
            std::io::ErrorKind::ConnectionRefused
            | std::io::ErrorKind::ConnectionReset
            | std::io::ErrorKind::ConnectionAborted
            | std::io::ErrorKind::BrokenPipe
            | std::io::ErrorKind::UnexpectedEof => ErrorKind::Unavailable,
            _ => ErrorKind::Io,
        };
        Error::new(kind, format!("{doing}: {e}"))
    }
    /// Adds the operation that failed (a verb phrase).
    pub fn doing(mut self, what: impl fmt::Display) -> Error {
        self.context = format!("{what}: {}", self.context);
        self
    }
    /// Adds a remedy, for the reader.
    pub fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Error {
        self.hint = Some(hint.into());
        self
    }
    /// Changes the kind, and with it what a caller can do; context and hint stay.
    pub fn of_kind(self, kind: ErrorKind) -> Error {
        Error { kind, ..self }
    }
}

/// Between the parts of an error that is shown, sent or kept as one text.
const HINT: &str = "; hint: ";

/// The context and the hint of an error that is one text.
pub fn split_hint(text: &str) -> (&str, Option<&str>) {
    text.split_once(HINT).map_or((text, None), |(context, hint)| (context, Some(hint)))
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "{HINT}{hint}"))
    }
}
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.kind)
    }
}
impl std::error::Error for Error {}

/// Context and hint are one text.
impl Wire for Error {
    fn encode(&self, w: &mut Writer) {
        self.kind.number().encode(w);
        self.to_string().encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let n = u8::decode(r)?;
        let kind = ErrorKind::from_number(n)
            .ok_or_else(|| crate::wire::malformed(format!("{n} is not a kind of error")))?;
        Ok(Error::of_text(kind, String::decode(r)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_wire() {
        for kind in KINDS.into_iter().chain(NAME_RULES.map(ErrorKind::Name)) {
            assert_eq!(ErrorKind::from_number(kind.number()), Some(kind));
        }
        let busy = ErrorKind::Busy { wait_ms: 20 };
        assert_eq!(
            ErrorKind::from_number(busy.number()),
            Some(ErrorKind::Unavailable),
            "older peers know no other"
        );
        assert_eq!(ErrorKind::from_number(0), None);
        assert_eq!(ErrorKind::from_number(255), None);
    }

    #[test]
    fn a_hint_survives_the_wire_as_a_part_of_the_text() {
        let plain = Error::denied("no place").doing("begin");
        let hinted = Error::denied("no place").hint("see to it; hint: twice").doing("begin");
        assert_eq!(plain.to_string(), "begin: no place");
        assert_eq!(format!("{hinted:?}"), "Denied: begin: no place; hint: see to it; hint: twice");
        for error in [plain, hinted] {
            let text = error.to_string();
            let as_before = [&[error.kind.number()][..], &text.to_bytes()].concat();
            assert_eq!(error.to_bytes(), as_before, "older peers read and write one text");
            assert_eq!(Error::from_bytes(&as_before), Ok(error.clone()));
            assert_eq!(Error::of_text(error.kind, text), error);
        }
        assert_eq!(split_hint("a"), ("a", None));
        assert_eq!(split_hint("a; hint: b; hint: c"), ("a", Some("b; hint: c")));
    }
}
