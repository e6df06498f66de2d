//! `nvtx`: what a probe of a function of NVTX is to read. The record is a mark ([`crate::mark::Nvtx`]).

/// What the function gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Function {
    /// `NVTX_*` action of [`crate::mark`].
    pub action: u16,
    /// Number of the argument (0 or 1) that is a string, that is a `nvtxEventAttributes_t`, that is a range's number.
    pub text: Option<u8>,
    pub attributes: Option<u8>,
    pub range: Option<u8>,
    /// Argument 0 is a domain's handle.
    pub has_domain: bool,
}

const ACTION: u32 = 40;
const TEXT: u32 = 44;
const ATTRIBUTES: u32 = 46;
const RANGE: u32 = 48;
const DOMAIN: u32 = 50;

/// Two bits: whether there is one, and its number.
const fn pack(argument: Option<u8>) -> u64 {
    match argument {
        Some(number) => 2 | (number & 1) as u64,
        None => 0,
    }
}

const fn unpack(cookie: u64, at: u32) -> Option<u8> {
    if cookie >> at & 2 == 0 { None } else { Some((cookie >> at & 1) as u8) }
}

impl Function {
    /// Attach cookie: the point's ([`crate::call::cookie`]) and this.
    #[must_use]
    pub const fn cookie(&self, point: u32, has_return: bool) -> u64 {
        crate::call::cookie(point, has_return)
            | (self.action as u64 & 0xf) << ACTION
            | pack(self.text) << TEXT
            | pack(self.attributes) << ATTRIBUTES
            | pack(self.range) << RANGE
            | (self.has_domain as u64) << DOMAIN
    }

    /// Inverse of [`Function::cookie`].
    #[must_use]
    pub const fn from_cookie(cookie: u64) -> Self {
        Self {
            action: (cookie >> ACTION & 0xf) as u16,
            text: unpack(cookie, TEXT),
            attributes: unpack(cookie, ATTRIBUTES),
            range: unpack(cookie, RANGE),
            has_domain: cookie >> DOMAIN & 1 == 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_a_function() {
        let function =
            Function { action: 3, text: Some(0), attributes: None, range: Some(1), has_domain: true };
        let cookie = function.cookie(77, true);
        assert_eq!(Function::from_cookie(cookie), function);
        assert_eq!(crate::call::from_cookie(cookie), (77, true));
        assert_eq!(Function::from_cookie(crate::call::cookie(7, false)), Function::default());
    }
}
